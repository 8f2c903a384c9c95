"""What all sections have in common."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions ("1" or true is no number); field
    docstrings become the reference."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


Name = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[Name, AfterValidator(os.path.expanduser)]
"""A file or folder. ~ is the home folder here too, which no shell has put in its place."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
