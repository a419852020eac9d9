"""One line of a diagnosis, and how all of them are told. Knows nothing of what is looked at."""

import textwrap
from dataclasses import dataclass, field

OK, NOTE, BAD = VERDICTS = ("ok", "note", "bad")
WIDTH = 110


@dataclass(frozen=True)
class Line:
    """What was found of one thing.

    Attributes:
        name: of the thing, such as "torch".
        verdict: "ok"; "note": works, but something is slower or missing; "bad": must be mended.
        text: what was found, for people; line breaks are kept.
        mend: the command that mends it, or None. Every bad line has one.
        facts: the same for programs: what JSON can hold.
    """

    name: str
    verdict: str
    text: str
    mend: str | None = None
    facts: dict = field(default_factory=dict)


def worst(lines):
    """The worst verdict of some lines."""
    return max((line.verdict for line in lines), key=VERDICTS.index, default=OK)


def describe(lines):
    """The lines as aligned text: verdict, name, what was found, and below it what to type."""
    names = max((len(line.name) for line in lines), default=0)
    told = []
    for line in lines:
        rows = [row for part in line.text.splitlines() for row in textwrap.wrap(
            part, WIDTH - names - 8, break_long_words=False, break_on_hyphens=False) or [""]]  # fmt: skip
        told.append(f"{line.verdict:<4}  {line.name:<{names}}  {rows[0] if rows else ''}".rstrip())
        told += [f"{'':{names + 8}}{row}" for row in rows[1:]]
        if line.mend:  # in one piece, to be copied
            told.append(f"{'':{names + 8}}{'type:' if line.verdict == BAD else 'to change it:'} {line.mend}")
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in VERDICTS}
    told += ["", f"{counts[OK]} ok, {counts[NOTE]} to note, {counts[BAD]} bad"]
    return "\n".join(told)


def as_dict(lines):
    """The lines as one object for JSON: the worst verdict, and a list of `checks`."""
    checks = [{"name": line.name, "verdict": line.verdict, "text": line.text, "mend": line.mend, "facts": line.facts}
              for line in lines]  # fmt: skip
    return {"verdict": worst(lines), "checks": checks}
