"""Places that keep files by name, which a URL names: buckets (s3://, gs://), and folders that are written like one (file://)."""
