"""Public names of a package that are loaded when they are first used."""

import importlib

from ._compat import missing_package_error


def lazy_names(namespace, exports, check=None):
    """`__getattr__` and `__dir__` of a package whose public names are loaded when they are first used.

    Args:
        namespace (dict): the globals of the package.
        exports (dict[str, str]): public name -> module of the package that defines it.
        check (callable or None): called before a name is loaded; raises ImportError for what is missing.
    """
    package = namespace["__name__"]

    def __getattr__(name):
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            if check is not None:
                check()
            module = importlib.import_module(f".{exports[name]}", package)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(package):
                raise
            raise missing_package_error(f"{package}.{name}", error) from error
        value = namespace[name] = getattr(module, name)
        return value

    return __getattr__, lambda: sorted({*namespace, *exports})
