"""Regular expressions read text from outside. None may take a time that grows with the square of a text's length."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from hypothesis import example, given
from hypothesis import strategies as st

import delayer
from delayer.core.readable import mask
from delayer.core.secret import AS_PARAMETER, HIDDEN, concealed

ROOT: Final = Path(delayer.__file__).parent
OF_OPERATOR: Final = "the operator's own text"
ONE_PLACE: Final = "a match at one place"
BY_CODE: Final = "a pattern of the code or of the operator"
REVIEWED: Final = {
    ("audit.connection", "invalid sn"): "PostgreSQL's texts about a snapshot, which quote no message",
    ("audit.dataset", r"v(\d+)-(\d"): ONE_PLACE,
    ("audit.extract", r"\A[^/]*//["): OF_OPERATOR,
    ("audit.spark", "[A-Za-z][A"): OF_OPERATOR,
    ("audit.spark", r"local\[(\*"): OF_OPERATOR,
    ("audit.tasks", r"^(?!(?:\w+"): "it begins only at a line's beginning, and each part ends before the next",
    ("audit.tasks", "most recen"): "no repeat passes over the beginning of another match",
    ("broker.verify", None): "a policy of the broker's administrator, and a name of at most 255 bytes",
    ("config.sources", "DELAYER_(S"): ONE_PLACE,
    ("config.values", "[^:]+:[0-9"): ONE_PLACE,
    ("config.values", None): BY_CODE,
    ("core.errors", r"\[Errno -?"): "no repeat passes over the beginning of another match",
    ("core.importing", r"s([^\w\\])"): OF_OPERATOR,
    ("core.importing", None): BY_CODE,
    ("core.readable", r":/+[^\s:@/"): "from each colon it reads up to the next one",
    ("core.secret", r"(?i)\b((?:"): "it begins at a word, reads no other word before the value, and no value again",
    ("core.secret", "(?P<scheme"): ONE_PLACE,
    ("http.endpoints", "^(Input|St"): "pydantic's texts, which quote no value",
    ("http.openapi", r"\{(\w+):\w"): "paths in the code",
    ("imports.crontab", r"""\s*(["']?)"""): OF_OPERATOR,
    ("imports.crontab", r"(?:\w+=\S*"): OF_OPERATOR,
    ("imports.timeout_table", ".+_delayer"): "the name of a table, of at most 63 bytes",
}
"""Why a repeat without a limit costs nothing, though something must follow it. By module, and the pattern's beginning.
"""


def patterns() -> Iterator[tuple[str, str | bytes | None]]:
    """Every pattern that the code gives to ``re``, with its module; None for one that comes from elsewhere."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name), args=[first, *_]) if (
                    name != "escape"
                ):
                    module = ".".join(("delayer", *path.relative_to(ROOT).with_suffix("").parts))
                    names = vars(importlib.import_module(module))
                    try:
                        yield module, eval(compile(ast.Expression(first), module, "eval"), names)
                    except NameError:
                        yield module, None


def may_read_again(parsed: Iterable[Any], *, is_last: bool = True) -> bool:
    """Whether a repeat without a limit has something behind it: if that does not follow, the search begins again."""
    parts = list(parsed)
    for at, (operation, argument) in enumerate(parts):
        last = is_last and at == len(parts) - 1
        match str(operation), argument:
            case "MAX_REPEAT" | "MIN_REPEAT", (_, most, inner):
                unlimited = most is re._constants.MAXREPEAT  # type: ignore[attr-defined]
                if (unlimited and not last) or may_read_again(inner, is_last=last and most == 1):
                    return True
            case "SUBPATTERN", (*_, inner):
                if may_read_again(inner, is_last=last):
                    return True
            case "BRANCH", (_, branches):
                if any(may_read_again(one, is_last=last) for one in branches):
                    return True
            case "ASSERT" | "ASSERT_NOT", (_, inner):
                if may_read_again(inner, is_last=False):
                    return True
    return False


def test_no_pattern_reads_a_text_from_outside_again_from_every_place() -> None:
    parse = re._parser.parse  # type: ignore[attr-defined]
    found = {
        (module.removeprefix("delayer."), pattern and pattern[:10])
        for module, pattern in patterns()
        if pattern is None or may_read_again(parse(pattern))
    }
    assert found == REVIEWED.keys()


def test_patterns_with_a_required_end_are_recognized() -> None:
    parse = re._parser.parse  # type: ignore[attr-defined]
    for pattern in (":.*@", "(:/+[^:]*):[^ ]*@", "(?:(?:a+)b)?", "(a|b*c)d", "a*$", "(?=a*b)"):
        assert may_read_again(parse(pattern)), pattern
    for pattern in ("a*", "[^a]+", "a{1,9}b", "a|b+", "(a(b*))", "(a+)?"):
        assert not may_read_again(parse(pattern)), pattern


# The expressions before, which read the rest of the text again for every colon.
LOGIN: Final = re.compile(":.*@", re.DOTALL)
IN_AUTHORITY: Final = re.compile(r"(:/+[^\s:@/?#]*):[^\s]*@")
TEXTS: Final = st.text(st.sampled_from(":/@?#=a9 \n\x1c\xa0,.'\"")) | st.lists(
    st.sampled_from(["amqp://", ":/", ":", "@", "me", "pass", "token=", "host", "/", " ", "\n", "é"])
).map("".join)


@given(TEXTS)
@example("a ://me:p@ss@h://x:y@z b://c:d@e")
def test_a_password_is_masked_as_before(text: str) -> None:
    masked = IN_AUTHORITY.sub(rf"\1:{HIDDEN}@", text)
    assert mask(text) == AS_PARAMETER.sub(rf"\1{HIDDEN}", masked)


@given(TEXTS)
def test_a_login_is_recognized_as_before(text: str) -> None:
    if ":/" not in text and AS_PARAMETER.search(text) is None:
        assert concealed(text) == (HIDDEN if LOGIN.search(text) else text)
