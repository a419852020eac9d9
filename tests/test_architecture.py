"""Which module may import which: the table is the data, the imports are read from the source with `ast`."""

import ast
import json
import subprocess
import sys
import time
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

from d2amp_ext import _EXPORTS, cli

PACKAGE = "d2amp_ext"
FOUNDATION = "_compat errors"  # what every module may import

# Module -> the modules of this package that it imports, in the order of the data: a config becomes a policy, a policy a
# trainer, a trainer steps, a step records and metrics; the commands put it all together. "." is the package itself.
# An edge that is not here is an error, and so is one that nobody uses.
ALLOWED = {
    # the ground
    ".": "exports",
    "exports": "_compat",
    "errors": "",
    "_compat": "",
    "keys": "",
    "random_state": "",
    # cfg -> policy
    "config_files": "errors",
    "config": "config_files errors keys policy",
    "precisions": "_compat errors",
    "lazy": "config config_files errors keys",
    "policy": "_compat errors precisions",
    "scaling": "errors",
    # policy -> trainer -> step -> metrics
    "trainer": "_compat errors metrics numerics.investigate numerics.protect numerics.shield numerics.statistics policy "
    "random_state scaler_state step",
    "scaler_state": "",
    "step": "errors guard",
    "guard": "_compat",
    "metrics": "_compat",
    "hooks": "",
    "build": "errors trainer",
    "resume": "data.position random_state",
    "optimizer": "errors",
    "checkpoint": "errors files lightning_files",
    "lightning_files": "errors",
    "files": "",
    "evaluation": "errors numerics.protect numerics.shield",
    # what stays in fp32
    "numerics": "",
    "numerics.island": "",
    "numerics.operators": "numerics.island",
    "numerics.shield": "numerics.island numerics.operators",
    "numerics.statistics": "numerics.island",
    "numerics.modules": "errors numerics.island",
    # steps that were not finite
    "numerics.finding": "",
    "numerics.watch": "numerics.finding numerics.island",
    "numerics.apart": "random_state",
    "numerics.locate": "numerics.apart numerics.finding numerics.island numerics.watch step",
    "numerics.bundle": "errors files",
    "numerics.investigate": "numerics.bundle numerics.island numerics.locate random_state",
    "numerics.protect": "_compat errors numerics.island numerics.modules numerics.shield",
    "launch": "errors",
    # a precision against fp32
    "audit": "",
    "audit.compare": "",
    "audit.limits": "",
    "audit.choices": "numerics.island",
    "audit.training": "audit.choices monitor.stages numerics.apart numerics.island step",
    "audit.detections": "audit.compare audit.training evaluation numerics.apart random_state",
    "audit.pieces": "numerics.island numerics.shield",
    "audit.modules": "audit.compare audit.pieces audit.training numerics.apart numerics.island numerics.watch random_state",
    "audit.measure": "audit.detections audit.limits audit.modules audit.training errors numerics.island numerics.locate "
    "numerics.protect random_state",
    "audit.propose": "audit.measure",
    "audit.report": "audit.measure audit.modules audit.propose",
    "audit.plot": "",
    "audit.subject": "checkpoint config config_files errors evaluation launch lazy preflight random_state",
    # records -> scalars -> EventStorage
    "monitor": "monitor.build",
    "monitor.names": "",
    "monitor.stages": "",
    "monitor.devices": "",
    "monitor.flops": "",
    "monitor.console": "",
    "monitor.readout": "monitor.names",
    "monitor.steps": "",
    "monitor.speed": "",
    "monitor.memory": "",
    "monitor.gradients": "",
    "monitor.updates": "",
    "monitor.board": "",
    "monitor.histograms": "monitor.gradients",
    "monitor.images": "monitor.stages predictions random_state",
    "monitor.build": "monitor.board monitor.console monitor.devices monitor.flops monitor.gradients monitor.histograms "
                     "monitor.images monitor.memory monitor.readout monitor.speed monitor.stages monitor.steps "
                     "monitor.updates",
    # data sets
    "data": "",
    "data.specs": "errors",
    "data.readers": "errors",
    "data.coco_format": "errors",
    "data.shapes": "data.coco_format",
    "data.nuclei": "data.coco_format errors",
    "data.register": "data.coco_format data.nuclei data.readers data.shapes data.specs errors",
    "data.position": "random_state",
    # what is put together from them
    "default_trainer": "_compat build checkpoint config data.register evaluation hooks monitor optimizer policy resume "
                       "scaling trainer",
    "preflight": "checkpoint config data.register errors policy",
    "predictor": "checkpoint config data.register errors evaluation launch policy",
    "predictions": "errors",
    # what install() exchanges in Detectron2
    "patches": "",
    "patches.current": "config data.register keys lazy",
    "patches.configs": "_compat config data.register lazy patches.current",
    "patches.loops": "_compat",
    "patches.models": "errors evaluation numerics.protect patches.current patches.loops policy step",
    "patches.updates": "patches.current patches.models step",
    "patches.standalone": "build checkpoint hooks monitor patches.models resume",
    "patches.trainers": "build default_trainer patches.current patches.loops patches.models patches.standalone policy scaling "
    "trainer",
    "patches.processes": "launch patches.current",
    "patches.table": "config data.register patches.configs patches.current patches.loops patches.models patches.processes "
    "patches.trainers patches.updates",
    # with Lightning
    "lightning": "_compat exports",  # and its own modules, by name
    "lightning.names": "errors precisions",
    "lightning.window": "",
    "lightning.retry": "random_state",
    "lightning.precision": "errors guard lightning.names lightning.retry lightning.window numerics.protect numerics.statistics precisions "
    "scaler_state step",
    "lightning.data": "config data.register default_trainer scaling",
    "lightning.checkpoint": "checkpoint files lightning_files",
    "lightning.loop": "default_trainer errors trainer",
    "lightning.module": "_compat default_trainer errors evaluation hooks launch lightning.checkpoint lightning.data lightning.loop "
    "lightning.precision policy step",
    "lightning.options": "errors lightning.checkpoint lightning.names lightning.precision policy",
    # the set-up, which must run before torch and Detectron2 are there
    "installer": "",
    "installer.probe": "",
    "installer.wheel": "",
    "installer.environment": "installer.probe",
    "installer.venv": "_compat errors installer.environment installer.probe",
    "installer.steps": "_compat installer.environment installer.probe installer.wheel",
    # the doctor, which must run without them, too
    "doctor": "",
    "doctor.lines": "",
    "doctor.storage": "doctor.lines",
    "doctor.machine": "_compat",
    "doctor.packages": "_compat doctor.lines installer.probe installer.steps installer.wheel",
    "doctor.devices": "doctor.lines doctor.machine installer.steps",
    "setup_detectron2": "errors installer.environment installer.steps installer.venv installer.wheel",
    # the command line
    "commands": "",
    "commands.flags": "",
    "commands.train": "checkpoint commands.flags config config_files default_trainer launch preflight",
    "commands.lazy": "build checkpoint commands.flags config_files errors evaluation hooks launch lazy monitor policy preflight "
                     "resume",
    "commands.run": "errors patches.current patches.table",
    "commands.lightning": "_compat checkpoint commands.flags config config_files errors launch lightning lightning.names "
    "lightning.options lightning_files policy preflight",
    "commands.predict": "checkpoint config config_files errors predictions predictor",
    "commands.replay": "checkpoint config config_files errors launch lazy numerics.bundle numerics.finding numerics.locate "
    "numerics.protect policy precisions random_state",
    "commands.audit": "_compat audit.limits audit.measure audit.plot audit.propose audit.report audit.subject errors files "
    "policy precisions",
    "commands.doctor": ". doctor.devices doctor.lines doctor.machine doctor.packages doctor.storage",
    "commands.demo": "config data.register default_trainer errors evaluation launch policy preflight",
    "cli": ". _compat errors",  # "." for __version__; it imports commands by name
}
ALLOWED = {module: set(names.split()) for module, names in ALLOWED.items()}

# Modules that may import nothing but the ground, and what needs neither torch nor Detectron2 to be imported.
GROUNDED = {"policy": {"precisions"}, "precisions": set(), "step": {"guard"}, "guard": set(), "errors": set(), "_compat": set()}
WITHOUT_TORCH = [".", "errors", "_compat", "exports", "keys", "cli", "commands", "commands.flags", "commands.train", "commands.lazy",
                 "commands.run", "commands.lightning", "lightning", "commands.predict", "commands.replay", "commands.audit",
                 "commands.demo", "commands.doctor", "doctor", "doctor.devices", "doctor.lines", "doctor.machine", "doctor.packages",
                 "doctor.storage", "installer", "installer.environment", "installer.probe", "installer.steps", "installer.venv",
                 "installer.wheel", "setup_detectron2"]  # fmt: skip

MOST_LINES = 300
# Modules that are longer than a module of this house should be.
LONG = {"checkpoint", "config", "policy", "trainer", "lightning.module", "lightning.precision", "installer.steps",
        "data.readers", "data.coco_format", "data.register",
        "commands.predict"}  # fmt: skip
LONG_FROM = 250
MOST_LINES_OF_A_TOOL = 90


def module_name(path):
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "."


def full_name(module):
    return PACKAGE if module == "." else f"{PACKAGE}.{module}"


MODULES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py")) if "configs" not in path.parts}


def imported_names(path):
    """Full names of what a file imports anywhere in it: `from a.b import c` gives a.b.c."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def edges_of(path):
    found = set()
    for name in imported_names(path):
        if name.split(".")[0] != PACKAGE:
            continue
        parts = name.split(".")[1:]
        while parts and ".".join(parts) not in MODULES:  # a name in a module
            parts.pop()
        found.add(".".join(parts) or ".")
    return found


EDGES = {module: edges_of(path) for module, path in MODULES.items()}


def test_the_reader_sees_every_form_of_import(tmp_path, monkeypatch):
    """`ast` and paths are easily got wrong, and a reader that sees nothing would find nothing to complain about."""
    path = ROOT / PACKAGE / "data" / "register.py"
    monkeypatch.setattr(ast, "parse", lambda text, parse=ast.parse: parse(
        "import d2amp_ext.policy\nimport torch, d2amp_ext.step as s\nfrom .. import trainer\nfrom . import shapes\n"
        "from ..config import load_cfg\nfrom .specs import Spec\nfrom d2amp_ext import hooks, AMPTrainer\n"
        "def f():\n    from ..commands.train import run\n"
        "try:\n    from .nuclei import x\nexcept ImportError:\n    pass\n"))  # fmt: skip
    expected = {"policy", "step", "trainer", "config", "commands.train", "data.shapes", "data.specs", "data.nuclei", "hooks", "."}
    assert edges_of(path) == expected


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_the_table_says_and_no_more(module):
    assert module in ALLOWED, f"{module} is new: say in the table what it may import"
    assert EDGES[module] == ALLOWED[module]


def test_the_table_has_no_entry_for_a_module_that_is_gone():
    assert ALLOWED.keys() == MODULES.keys()


def test_what_is_imported_by_name_exists():
    assert {module for module, _ in cli.COMMANDS.values()} <= MODULES.keys()
    assert set(_EXPORTS.values()) <= MODULES.keys()


def test_there_are_no_cycles():
    by_name = {".": EDGES["."] | set(_EXPORTS.values()), "cli": EDGES["cli"] | {name for name, _ in cli.COMMANDS.values()}}
    order = list(TopologicalSorter({**EDGES, **by_name}).static_order())  # CycleError names the modules of a cycle
    assert len(order) == len(MODULES)


def test_nothing_imports_the_command_line():
    for module, edges in EDGES.items():
        assert "cli" not in edges
        assert module in ("cli", "commands") or not [edge for edge in edges if edge.startswith("commands")
                                                        and (edge, module[:9]) != ("commands.flags", "commands.")]


@pytest.mark.parametrize("module", GROUNDED)
def test_the_core_stands_on_the_ground_alone(module):
    assert EDGES[module] <= {*FOUNDATION.split(), *GROUNDED[module]}


def test_nothing_of_the_package_knows_the_tests_or_tools():
    roots = {name.split(".")[0] for path in MODULES.values() for name in imported_names(path)}
    assert not roots & {"tests", "conftest", "tools", "pytest", "hypothesis"}
    others = roots - sys.stdlib_module_names - {PACKAGE}
    assert others <= {"torch", "detectron2", "fvcore", "iopath", "numpy", "PIL", "yaml", "pycocotools", "tqdm", "portalocker",
                      "contourpy", "packaging", "omegaconf", "lightning", "matplotlib"}  # fmt: skip


def test_modules_stay_short():
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert not {module: count for module, count in lines.items() if count > MOST_LINES}
    assert {module for module, count in lines.items() if count > LONG_FROM} == LONG


def test_tools_are_thin():
    tools = sorted((ROOT / "tools").glob("*.py"))
    assert tools
    for path in tools:
        assert len(path.read_text(encoding="utf-8").splitlines()) < MOST_LINES_OF_A_TOOL, path.name
        assert not [name for name in imported_names(path) if name.split(".")[0] in ("torch", "detectron2")]


def run(code, *args):
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_modules_that_must_be_importable_without_torch():
    code = """if True:
        import importlib, sys
        for name in ("torch", "torchvision", "detectron2", "numpy", "fvcore", "cv2"):
            sys.modules[name] = None
        for name in sys.argv[1:]:
            importlib.import_module(name)
    """
    run(code, *map(full_name, WITHOUT_TORCH))


def test_importing_the_package_costs_nothing():
    def seconds(code):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            out = run(code + "; import sys; print(len({'torch', 'detectron2', 'numpy'} & set(sys.modules)))")
            times.append(time.perf_counter() - start)
            assert out.strip() == "0"
        return min(times)

    assert seconds(f"import {PACKAGE}") - seconds("pass") < 0.3


def test_importing_every_module_registers_and_changes_nothing():
    """Not a data set, not a registry entry, not a switch of torch, not a function of Detectron2, not a log handler."""
    code = """if True:
        import importlib, json, logging, os, sys, warnings
        import torch, lightning.pytorch, detectron2.engine, detectron2.modeling, detectron2.evaluation, detectron2.solver
        from detectron2.config import get_cfg
        from detectron2.data import DatasetCatalog, MetadataCatalog
        from fvcore.common.registry import Registry

        def state():
            registries = {f"{m}.{k}": sorted(n for n, _ in v) for m, module in list(sys.modules.items())
                          if m.startswith("detectron2") and module for k, v in vars(module).items() if isinstance(v, Registry)}
            functions = {f"{m}.{k}": id(v) for m in ("detectron2.engine", "detectron2.engine.defaults",
                         "detectron2.engine.train_loop", "detectron2.engine.hooks", "detectron2.config",
                         "detectron2.checkpoint.detection_checkpoint", "detectron2.evaluation.evaluator", "torch.optim",
                         "detectron2.solver.build") for k, v in vars(sys.modules[m]).items() if callable(v)}
            methods = {f"{c.__name__}.{k}": id(v) for c in (detectron2.engine.DefaultTrainer, detectron2.engine.SimpleTrainer,
                       detectron2.engine.AMPTrainer, type(get_cfg()), torch.amp.GradScaler) for k, v in vars(c).items()}
            return {
                "datasets": sorted(DatasetCatalog.list()),
                "metadata": sorted(MetadataCatalog.list()),
                "registries": registries,
                "functions": functions,
                "methods": methods,
                "cfg": get_cfg().dump(),
                "torch": [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.get_num_threads(),
                          torch.get_default_dtype() is torch.float32, torch.get_rng_state().tolist()],
                "environment": dict(os.environ),
                "path": sys.path,
                "handlers": [repr(h) for name in ("", "detectron2", "fvcore", "d2amp_ext") for h in
                             logging.getLogger(name).handlers],
            }

        before = state()
        filters = list(warnings.filters)
        for name in sys.argv[1:]:
            importlib.import_module(name)
        after = state()
        changed = {key for key in before if before[key] != after[key]}
        if changed - {"registries"}:
            raise SystemExit(str(changed))
        new = {name: entries for name, entries in after["registries"].items() if before["registries"].get(name) != entries}
        ours = sys.modules["d2amp_ext"].TRAINER_REGISTRY
        print(json.dumps([sorted(new), sorted(name for name, _ in ours), warnings.filters == filters]))
    """
    new, trainers, same_filters = json.loads(run(code, *map(full_name, MODULES)).splitlines()[-1])
    assert new == [] and trainers == ["AMPTrainer"] and same_filters
