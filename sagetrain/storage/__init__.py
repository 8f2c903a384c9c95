"""Places that keep files by name, which a URL names: buckets (s3://), and folders that are written like one (file://)."""
