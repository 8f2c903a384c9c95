"""What all sections have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions ("1" or true is no number); field
    docstrings become the reference."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


Fraction = Annotated[float, Field(ge=0, lt=1)]
