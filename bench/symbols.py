"""Which function of ours a symbol of the compiled hot path is: ``Class.method (file)``, as bench/stages.py takes it.

mypyc names a C function after the shortest end of its module's name that no other module has, the class and the
function, with three underscores between. Inner functions and coroutines become classes, named after what they stand in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("engines", "worker", "frontend")
_SEPARATOR = "___"
_OF_THE_COMPILER = re.compile(r"(\.\w+)+$")
"""What the C compiler appends to parts and copies of a function, like ``.part.0``."""
_MADE_CLASS = re.compile(r"(?P<function>\w+?)(_(?P<owner>[A-Z][A-Za-z0-9]*))?_(gen|env|obj)")


class Symbols:
    """The functions of one compiled unit."""

    def __init__(self, modules: Iterable[str]) -> None:
        """Take the unit's modules, as paths without ending, relative to the repository."""
        self._files = {
            end.replace("/", _SEPARATOR): f"{module}.py" for module, end in shortest_ends(list(modules)).items()
        }
        names = "|".join(sorted(map(re.escape, self._files), key=len, reverse=True))
        self._form = re.compile(rf"(CPyDef_|CPyPy_)?(?P<module>{names}){_SEPARATOR}(?P<rest>\w+)")

    def frame(self, symbol: str) -> str | None:
        """Return the function, or None if the symbol is none of this unit's modules."""
        found = self._form.fullmatch(_OF_THE_COMPILER.sub("", symbol)) if self._files else None
        if found is None:
            return None
        owner, between, name = found["rest"].partition(_SEPARATOR)
        if not between or not owner:
            owner, name = "", found["rest"]
        made = _MADE_CLASS.fullmatch(owner or name)
        if made is not None:
            owner, name = made["owner"] or "", made["function"]
        return f"{owner}.{name} ({self._files[found['module']]})".removeprefix(".")


def shortest_ends(modules: list[str]) -> dict[str, str]:
    """Return the shortest end of every module's path that no other one has. Pure."""
    counts = Counter(end for module in modules for end in _ends(module))
    return {module: next((end for end in _ends(module) if counts[end] == 1), module) for module in modules}


def compiled_modules(tree: Path) -> list[str]:
    """Return the modules of a tree that have an extension module beside their source."""
    found = []
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.so")):
            source = path.with_name(path.name.split(".")[0]).with_suffix(".py")
            if source.is_file():
                found.append(str(source.relative_to(tree).with_suffix("")))
    return found


def _ends(module: str) -> Iterator[str]:
    parts = module.split("/")
    for length in range(1, len(parts) + 1):
        yield "/".join(parts[-length:])
