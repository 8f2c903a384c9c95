"""The command `sagetrain replay`: take a step that went wrong again."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from sagetrain.cli.exits import Errors as _Errors
from sagetrain.cli.exits import leave_together as _leave_together
from sagetrain.config.errors import ConfigError

Backend = enum.Enum("Backend", {name: name for name in ("sdpa", "sage", "flash", "reference")})  # type: ignore[misc]


Linear = enum.Enum("Linear", {name: name for name in ("recorded", "bf16")})  # type: ignore[misc]


def replay(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Folder that a bad step left: RUN/spikes/step-00000015.")
    ],
    attention: Annotated[
        Backend, typer.Option("--attention", help="Attention to compare the run's own with.")
    ] = Backend["sdpa"],
    recipe: Annotated[str | None, typer.Option(help="Recipe for --attention sage. Default: the run's own.")] = None,
    linear: Annotated[
        Linear, typer.Option(help="Linear layers together with that attention: as the run has them, or in 16 bits.")
    ] = Linear["recorded"],
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Take a step that went wrong again, and say whether its data or the precision is to blame.

    The step starts from the checkpoint before it and takes the same samples, once in the precision that it had and once
    with another attention (or with linear layers in 16 bits, if the run has them in 8). A spike that stays comes from
    the data or the weights. A spike that goes away comes from the precision. If it does not come back even in the first
    case, it comes from neither.

    \b
    sagetrain replay runs/325m/spikes/step-00001500 --attention sdpa --linear bf16
    """
    with _Errors() as errors:
        from sagetrain.cluster.launcher import launched
        from sagetrain.parallel.host import use_cores

        errors.rank, _ = launched()
        if not bundle.is_dir():
            raise ConfigError(f"there is no folder {bundle}; name one such as RUN/spikes/step-00000015")
        use_cores()
        from sagetrain.inference.replay import replay as take_again
        from sagetrain.inference.replay import table, to_json

        found = take_again(bundle, attention.value, recipe, linear.value == "bf16")
        if errors.rank == 0:
            typer.echo(json.dumps(to_json(found), indent=1) if as_json else table(found))
    _leave_together()
