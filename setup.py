"""Packaging of d2amp-ext. It imports neither torch nor the package, so it builds under pip's build isolation."""

import ast
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """``__version__`` as written in the package, read without importing it."""
    source = (HERE / "d2amp_ext" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise RuntimeError("d2amp_ext/__init__.py has no line `__version__ = ...`")


def read_readme() -> str:
    """The text shown on the package index; empty where the README is not there."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


EXTRAS = {
    "lightning": ["lightning>=2.4,<2.7"],
    "coco": ["faster-coco-eval"],
}

setup(
    name="d2amp-ext",
    version=read_version(),
    description="Mixed precision for Detectron2 as one setting: bf16, fp16, tf32 or fp32, watched and made fast",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["detectron2", "mixed precision", "amp", "bfloat16", "object detection"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # The recipes live beside the package and are packed into it. An editable install does not map them; the look-up
    # in the package falls back to the folder of the checkout.
    packages=find_packages(include=["d2amp_ext", "d2amp_ext.*"]) + ["d2amp_ext.configs"],
    package_dir={"d2amp_ext.configs": "configs"},
    package_data={"d2amp_ext": ["py.typed"], "d2amp_ext.configs": ["**/*.yaml", "**/*.py"]},
    include_package_data=False,
    # Not torch, whose build has to fit the machine, nor Detectron2, which is on no index: `d2amp setup` sees to both.
    install_requires=["fvcore", "iopath", "packaging", "tensorboard"],
    extras_require={
        **EXTRAS,
        "all": sorted(requirement for requirements in EXTRAS.values() for requirement in requirements),
        "test": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "build", *EXTRAS["lightning"]],
    },
    entry_points={"console_scripts": ["d2amp = d2amp_ext.cli:main"]},
    zip_safe=False,
)
