"""The rules of the house, read from the syntax trees: imports, sizes, signatures, documentation."""

import ast
import types
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from sagetrain.config import reference, schema
from sagetrain.config.reference import slot_of

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    [
        path
        for pattern in ("sagetrain/**/*.py", "kernels/sagekernels/**/*.py", "launch/*.py", "benchmarks/*.py")
        for path in ROOT.glob(pattern)
    ]
)
CODE = [*SOURCES, *sorted(ROOT.glob("tests/**/*.py"))]
MAX_LINES = {True: 450, False: 600}
"""The most lines of a file of the library, and of a file of tests."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Return the dotted names of the modules that a file imports. Relative imports are resolved."""
    package = {"kernels": lambda parts: parts[1:]}.get(path.relative_to(ROOT).parts[0], lambda parts: parts)
    parents = list(package(list(path.relative_to(ROOT).parts[:-1])))
    found = set()
    for node in _outside_functions(tree_of(path)) if top_level_only else ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            module = base if node.level else node.module
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def _outside_functions(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def below(folder: str) -> list[Path]:
    return [path for path in CODE if name_of(path).startswith(f"{folder}/")]


def packages(names: set[str]) -> set[str]:
    """Return SageTrain's own packages (the second part of the dotted name) among the names."""
    return {name.split(".")[1] for name in names if name.startswith("sagetrain.")}


# -- who may import whom -----------------------------------------------------------------------------------------

STDLIB = {"__future__", *__import__("sys").stdlib_module_names}
ENGINE_ROOM = {
    *("auto", "engines", "costs", "optim", "stability", "checkpoint"),
    *("cluster", "model", "parallel", "data", "storage", "config"),
}
FREE = {"doctor", "stress", "__version__"}
MAY_IMPORT = {
    "config": {"config"},
    "storage": {"storage", "config"},
    "parallel": {"parallel"},
    "model": {"model", "parallel", "config"},
    "data": {"data", "storage", "config"},
    # What no run imports: text and tokenizers become token files.
    "corpus": {"corpus", "data", "config"},
    "stability": {"stability", "model", "parallel", "config"},
    "cluster": {"cluster", "model", "data", "parallel", "storage", "config", "__version__"},
    "checkpoint": {"checkpoint", "cluster", "optim", "model", "data", "parallel", "storage", "config"},
    "optim": {"optim", "model", "config"},
    # What a run costs is asked from outside: models, parallel layers and optimizers never import it.
    "costs": {"costs", "optim", "model", "parallel", "config"},
    "engines": ENGINE_ROOM - {"auto", "storage"},
    "auto": {"auto", "costs", "checkpoint", "cluster", "model", "parallel", "data", "storage", "config"},
    "training": {"training", *ENGINE_ROOM, "__version__"},
    "inference": {"inference", "corpus", "planning", "training", *ENGINE_ROOM},
    "interop": {"interop", "inference", "training", *ENGINE_ROOM},
    "report": {"report", "costs", "checkpoint", "model", "data", "storage", "config", "__version__"},
    "planning": {"planning", "training", *ENGINE_ROOM},
    "cli": {
        *("cli", "comparing", "report", "interop", "inference", "corpus", "planning", "training", *ENGINE_ROOM, *FREE)
    },
    "comparing": {"comparing", "report", "training", *ENGINE_ROOM, "__version__"},
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_layers_import_downwards_only(package):
    for path in below(f"sagetrain/{package}"):
        assert packages(imports(path)) <= MAY_IMPORT[package], name_of(path)


def test_the_picture_of_the_imports_is_true():
    """Each floor of CONTRIBUTING's picture imports floors before it alone."""
    picture = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    floors = [{room.strip() for room in floor.split(",")} for floor in picture.split("->")]
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    assert {*MAY_IMPORT, "sagekernels"} <= floor_of.keys()
    for path in SOURCES:
        room = name_of(path).removeprefix("sagetrain/").partition("/")[0].removesuffix(".py")
        if (own := floor_of.get(room)) is not None:
            used = packages(imports(path)) | roots(imports(path)) & {"sagekernels"} - {room}
            above = {other for other in used - {room} if floor_of.get(other, 0) >= own}
            assert not above, (name_of(path), above)


def test_modules_import_each_other_in_no_circle():
    """The rule holds inside a package too, and for imports of types alone."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in below("sagetrain")}
    modules = set(names.values())
    uses = {name: (imports(path) & modules) - {name} for path, name in names.items()}
    while leaves := {name for name, used in uses.items() if not used}:
        uses = {name: used - leaves for name, used in uses.items() if name not in leaves}
    assert uses == {}


def test_every_package_has_a_rule():
    folders = {path.parent.name for path in (ROOT / "sagetrain").glob("*/__init__.py")}
    assert folders == set(MAY_IMPORT)


def test_config_and_planning_need_no_torch():
    light = {"yaml", "pydantic", "pydantic_core", "annotated_types", "sagetrain"}
    for path in below("sagetrain/config"):
        assert roots(imports(path)) <= STDLIB | light, name_of(path)
    model = ("model/tensors", "model/placement", "model/chunks")
    names = (*model, "auto/recomputation_choice", "optim/owners", "data/tokenizer", "training/lr_schedule")
    for path in [
        *below("sagetrain/planning"),
        *below("sagetrain/costs"),
        *(ROOT / f"sagetrain/{name}.py" for name in names),
    ]:
        assert roots(imports(path)) <= STDLIB | {"sagetrain", "rich", "sentencepiece", "tokenizers"}, name_of(path)


def test_kernels_stand_alone():
    for path in below("kernels/sagekernels"):
        trainer = {"transformers"} if path.name == "huggingface.py" else set()
        assert roots(imports(path)) <= STDLIB | {"torch", "triton", "numpy", "sagekernels"} | trainer, name_of(path)


def test_only_these_files_import_kernels():
    """The model uses attention, QK-norm and experts, collectives and gathered codes the casts of linear layers, and
    optimizers kernels of their own, with the memory that these update. The choices of `auto` and the measurements of
    errors use kernels as well, sums of gradients and hashes one of their own, and what records micro-steps sees whether
    they are observed. Families name numbers of an activation. The Matmul of a linear layer is a value that many files
    hand on, and so are recordings. Refusals are no kernels."""
    values = ("sagekernels.matmul", "sagekernels.lowbit", "sagekernels.refusals", "sagekernels.graphs")
    users = {name_of(path) for path in SOURCES
             if "sagekernels" in roots({name for name in imports(path) if not name.startswith(values)})}  # fmt: skip
    users -= {name_of(path) for path in below("kernels/sagekernels")}
    attention = (
        "model/backends",
        "model/chunk_layouts",
        "model/selection",
        "stability/monitor",
        "stability/linear_errors",
    )
    choices = ("auto/ahead", "auto/attention_choice", "auto/kept", "auto/linear_choice", "auto/timed_choice")
    names = (
        *attention,
        *choices,
        "engines/copied_reduction",
        "engines/gradient_sums",
        "engines/recorder",
        "interop/families",
        "model/attention",
        "model/dispatch",
        "model/moe",
        "parallel/collectives",
        "parallel/digest",
        *(f"optim/{name}" for name in ("adamw", "muon", "pieces", "states", "weights")),
    )
    assert users == {f"sagetrain/{name}.py" for name in names}


def test_deepspeed_is_imported_for_its_own_engine_alone():
    """The import takes up to a second of a start, and runs by FSDP2 do without it."""
    users = [path for path in SOURCES if "deepspeed" in roots(imports(path))]
    assert users == [ROOT / "sagetrain/engines/deepspeed/deepspeed_engine.py"]
    assert "deepspeed" not in roots(imports(users[0], top_level_only=True))


def test_the_command_line_loads_nothing_heavy():
    used = set().union(*(roots(imports(path, top_level_only=True)) for path in below("sagetrain/cli")))
    assert not used & {"torch", "deepspeed", "triton", "datasets", "numpy", "sagekernels"}


def test_few_files_see_the_whole_configuration():
    """The list has the build, the engine, controllers, the code that settles `auto`, and the run folder that keeps the
    configuration. Preflight compares it between hosts. Inputs, resume and init_from compare it with that of a
    checkpoint. Everything else gets its section. Tools that look at a run from outside (plan, eval) are not part of the
    run."""
    whole = {name_of(path) for path in SOURCES if "sagetrain.config.schema.RunConfig" in imports(path)}
    inside = {path for path in whole if not path.startswith("sagetrain/config/")}
    assert inside <= {
        "sagetrain/training/build_run.py",
        "sagetrain/training/program.py",
        "sagetrain/training/run.py",
        "sagetrain/engines/build_engine.py",
        "sagetrain/training/out_of_memory.py",
        "sagetrain/optim/build.py",
        "sagetrain/engines/deepspeed/deepspeed_config.py",
        "sagetrain/engines/deepspeed/deepspeed_engine.py",
        "sagetrain/engines/fsdp.py",
        "sagetrain/engines/sharding.py",
        "sagetrain/training/controllers.py",
        "sagetrain/auto/settled.py",
        "sagetrain/auto/timed_choice.py",
        "sagetrain/auto/overlap_choice.py",
        "sagetrain/training/inputs.py",
        "sagetrain/training/callbacks.py",
        "sagetrain/interop/looks.py",
        "sagetrain/api.py",
        "sagetrain/training/resume.py",
        "sagetrain/training/init_from.py",
        "sagetrain/training/start_line.py",
        "sagetrain/cluster/preflight.py",
        "sagetrain/cluster/run_folder.py",
        "sagetrain/costs/accounting.py",
        "sagetrain/costs/collective_costs.py",
        "sagetrain/costs/deepspeed_prices.py",
        "sagetrain/costs/memory.py",
        "sagetrain/costs/stages.py",
        "sagetrain/inference/load.py",
        "sagetrain/interop/importing.py",
        "sagetrain/interop/upcycling.py",
        "sagetrain/comparing/question.py",
        "sagetrain/planning/evidence.py",
        "sagetrain/planning/performance.py",
        "sagetrain/auto/kept.py",
        "sagetrain/planning/offload.py",
        "sagetrain/costs/host_memory.py",
        "sagetrain/planning/layouts.py",
        "sagetrain/planning/priced.py",
        "sagetrain/planning/sampling.py",
        "sagetrain/planning/changes.py",
        "sagetrain/planning/findings.py",
        "sagetrain/planning/plan.py",
        "sagetrain/planning/result.py",
        "sagetrain/planning/show.py",
        "benchmarks/layouts.py",
        "benchmarks/layout_run.py",
    }


def public_types(path: Path) -> list[str]:
    """Return the classes of a file, and the names that are assigned in their spelling: aliases of types,
    enumerations."""
    classes = [node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    assigned = [node.targets[0] for node in tree_of(path).body if isinstance(node, ast.Assign)]
    names = [target.id for target in assigned if isinstance(target, ast.Name)]
    return [name for name in [*classes, *names] if name[0].isupper() and name != name.upper()]


def test_a_public_type_has_one_meaning():
    found = defaultdict(list)
    for path in below("sagetrain"):
        for name in public_types(path):
            found[name].append(name_of(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_a_module_is_known_by_its_name():
    """Rules mirror the sections of the configuration, and the command line has a file for each verb. The modules that
    load a configuration and a run keep the names that scripts of users know: config.load, inference.load."""
    mirrors = {"sagetrain/config/rules", "sagetrain/config/sections", "sagetrain/cli"}
    found = defaultdict(list)
    for path in below("sagetrain"):
        if name_of(path.parent) not in mirrors and path.name not in ("__init__.py", "load.py"):
            found[path.name].append(name_of(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


# -- size, signatures, side effects ------------------------------------------------------------------------------


def test_files_are_short():
    lines = {path: len(path.read_text().splitlines()) for path in CODE}
    assert {name_of(path): number for path, number in lines.items() if number > MAX_LINES[path in SOURCES]} == {}


def test_comprehensions_hide_no_name_of_their_module():
    """Python 3.12 inlines comprehensions. Some of its releases then take a variable of one for a function of the module
    that another one calls."""
    hidden = []
    for path in [*below("sagetrain"), *below("kernels")]:
        tree = tree_of(path)
        names = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
                targets = [each for part in node.generators for each in ast.walk(part.target)]
                hidden += [(str(path), each.id) for each in targets if isinstance(each, ast.Name) and each.id in names]
    assert hidden == []


def test_public_functions_take_no_catch_all_keywords():
    """The kernels' test helpers may take them: they hand all of them to the function under test, which knows its own. A
    function that transformers calls may as well, because it refuses keywords that it does not know."""
    called = "kernels/sagekernels/huggingface.py", "kernels/sagekernels/testing.py"
    found = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.args.kwarg and not node.name.startswith("_")
        if name_of(path) not in called
    ]
    assert found == []


def test_public_functions_are_typed_and_classes_documented():
    found = []
    for path in below("sagetrain"):
        for node in ast.iter_child_nodes(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                found.append(f"{name_of(path)}:{node.lineno} class {node.name} has no docstring")
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    found.append(f"{name_of(path)}:{node.lineno} {node.name} has no docstring")
                if node.returns is None:
                    found.append(f"{name_of(path)}:{node.lineno} {node.name} has no return type")
    assert found == []


# Rooms whose documentation is plain English: a docstring begins with a verb or with the noun that it describes.
PLAIN = "sagetrain", "kernels", "benchmarks", "launch", "tests"
FRAGMENTS = (
    *("And ", "As ", "At ", "But ", "By ", "Else ", "From ", "How ", "In the ", "Its ", "Likewise", "Of ", "Or "),
    *("That ", "The other", "The same", "Their ", "Those ", "To ", "What ", "When ", "Where ", "Which ", "Who "),
    *("With ", "Without "),
)


def documented(tree: ast.Module):
    """Yield each docstring, also of attributes, with the node that it documents."""
    for parent in ast.walk(tree):
        if isinstance(parent, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, node in zip([parent, *parent.body], parent.body, strict=False):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is not ...:
                    yield before, node


@pytest.mark.parametrize("room", PLAIN)
def test_docstrings_are_no_fragments(room):
    """A docstring that begins with "Whether" describes a bool."""
    found = []
    for path in below(room):
        for owner, node in documented(tree_of(path)):
            kind = getattr(owner, "returns", None) or getattr(owner, "annotation", None)
            no_bool = node.value.value.startswith("Whether ") and "bool" not in ast.unparse(kind or node)
            if no_bool or node.value.value.startswith(FRAGMENTS):
                found.append(f"{name_of(path)}:{node.lineno} {node.value.value[:60]}")
    assert found == []


def test_names_of_tests_are_short():
    """A name has fewer than 60 characters. The docstring has room for the sentence."""
    names = [
        node.name for path in below("tests") for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)
    ]
    assert [name for name in names if name.startswith("test_") and len(name) >= 60] == []


def test_modules_do_nothing_when_imported():
    """A module has definitions, imports, constants and docstrings at its top level, and an `if` only for typing or
    __main__."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Try, ast.For)
    found = []
    for path in below("sagetrain"):
        for node in tree_of(path).body:
            documented = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            guarded = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
            registered = isinstance(node, ast.Expr) and ast.unparse(node.value).startswith("_Dumper.add_representer")
            if not (isinstance(node, allowed) or documented or guarded or registered):
                found.append(f"{name_of(path)}:{node.lineno} {ast.unparse(node)[:60]}")
    assert found == []


def test_custom_exceptions_are_few():
    found = {
        node.name
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith(("Error", "Exception")) for b in node.bases)
    }
    assert found <= {"CompilationError", "ConfigError", "CheckpointError", "RanksMissing", "TrainingError"}


# -- the schema --------------------------------------------------------------------------------------------------


def section_classes() -> list[type[schema.Section]]:
    return [
        value
        for value in vars(schema).values()
        if isinstance(value, type) and issubclass(value, schema.Section) and value is not schema.Section
    ]


def test_the_schema_has_every_section_there_is():
    """Sections may be defined anywhere, and schema is the one place to import them from. Private bases stay there."""
    defined = {
        node.name
        for path in below("sagetrain/config/sections")
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    assert defined | {"RunConfig"} == {section.__name__ for section in section_classes()} | {"Section"}


@pytest.mark.parametrize("section", section_classes(), ids=lambda section: section.__name__)
def test_every_key_is_documented(section):
    assert section.__doc__
    for name, field in section.model_fields.items():
        is_tag = name == "schedule" and len(get_args(field.annotation)) == 1
        is_section = len(slot_of(field).sections) == 1  # The section's own docstring describes it.
        assert field.description or is_tag or is_section, f"{section.__name__}.{name} has no docstring below it"


@pytest.mark.parametrize("section", section_classes(), ids=lambda section: section.__name__)
def test_no_attribute_of_a_section_is_silently_not_a_key(section):
    """An attribute without annotation would look like a key and be ignored."""
    inherited = set(dir(BaseModel))
    own = {name for name in vars(section) if not name.startswith("_") and name not in inherited}
    plain = {name for name in own if not isinstance(vars(section)[name], property | types.FunctionType)}
    assert plain - set(section.model_fields) == set()


def test_every_key_is_used():
    """Some file outside the configuration reads the name of each key. A key that nothing reads would be a promise not
    kept."""
    all_keys = reference.keys()
    attributes = {node.attr for path in SOURCES for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    unused = [key.name for key in all_keys if key.name.rpartition(".")[2] not in attributes | {"schedule"}]
    assert unused == []
