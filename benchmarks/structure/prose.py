"""The prose of a file, passage by passage, and the markers in it that plain technical English does without."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

PassageKind: TypeAlias = Literal["docstring", "comment", "message", "name", "text"]
"""`message`: a string in a raise, an assertion, a log event, a command's help or the arguments of a class; `name`: that
of a test; `text`: a paragraph of a page."""

WORDS = re.compile(r"\b(whoever|nobody|somebody|so many)\b", re.IGNORECASE)
OPENERS = re.compile(r"(?:It|They|These|Those|Of|So|What|Who)\b")
CODE = re.compile(r"`[^`\n]*`")
WORD = re.compile(r"[^\W\d_][\w'-]*")

LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
HELP_ARGUMENTS = {"help", "description", "epilog"}
DIRECTIVE = re.compile(r"^(?:!|noqa|type:|fmt:|mypy:|pragma:|ruff:)[^#]*#?\s*")


@dataclass(frozen=True)
class Passage:
    """A docstring, a block of comment lines, or another text that one may read by itself."""

    line: int
    kind: PassageKind
    text: str

    @property
    def opener(self) -> str | None:
        """The first word, where it is one of those that a docstring or comment does not open with."""
        found = OPENERS.match(self.text.lstrip()) if self.kind in {"docstring", "comment"} else None
        return found[0] if found else None

    @property
    def words(self) -> int:
        return len(WORD.findall(self.text))

    def marked_words(self) -> list[tuple[int, str, str]]:
        """Line, word and text of the line for each marker word that is not quoted as code."""
        text = CODE.sub("``", self.text).replace("_", " ")
        found = [
            (number, word, line.strip())
            for number, line in enumerate(text.splitlines(), self.line)
            for word in WORDS.findall(line)
        ]
        whole = len(WORDS.findall(" ".join(text.split())))
        if whole > len(found):  # one of two words, across the end of a line
            found.append((self.line, "so many", self.text.splitlines()[0]))
        return found


def passages(path: Path) -> list[Passage]:
    """The passages of a Python, C++ or Markdown file."""
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            return [*_docstrings(text), *_python_comments(text), *_messages(text), *_test_names(text)]
        case ".md":
            return list(_paragraphs(text))
        case _:
            return list(_cpp_comments(text))


def complaints(path: Path, root: Path) -> Iterator[str]:
    """`path:line: marker: text` for each marker word of a file and each opener of its docstrings."""
    name = path.relative_to(root)
    for passage in passages(path):
        for line, word, text in passage.marked_words():
            yield f"{name}:{line}: {word.lower()}: {text}"
        if passage.kind == "docstring" and passage.opener:
            yield f"{name}:{passage.line}: opens with {passage.opener}: {passage.text.lstrip().splitlines()[0]}"


def docstring_nodes(tree: ast.AST) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes and functions, and strings that stand as statements after an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _docstrings(text: str) -> Iterator[Passage]:
    for node in docstring_nodes(ast.parse(text)):
        yield Passage(node.lineno, "docstring", str(node.value))


def _python_comments(text: str) -> Iterator[Passage]:
    yield from _blocks(
        [
            (token.start[0], not token.line[: token.start[1]].strip(), comment)
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT and (comment := DIRECTIVE.sub("", token.string[1:].strip()))
        ]
    )


def _blocks(comments: list[tuple[int, bool, str]]) -> Iterator[Passage]:
    """Join whole-line comments of consecutive lines; each comment is its line, whether it stands alone, its text."""
    block: list[str] = []
    first = last = 0
    for line, stands_alone, comment in comments:
        if block and stands_alone and line == last + 1:
            block.append(comment)
            last = line
            continue
        if block:
            yield Passage(first, "comment", "\n".join(block))
        block, first, last = [comment], line, line if stands_alone else -1
    if block:
        yield Passage(first, "comment", "\n".join(block))


def _messages(text: str) -> Iterator[Passage]:
    tree = ast.parse(text)
    found: dict[int, Passage] = {}
    for node in ast.walk(tree):
        for source in _message_sources(node):
            for part in ast.walk(source):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    found[id(part)] = Passage(part.lineno, "message", part.value)
    yield from found.values()


def _message_sources(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Raise(exc=ast.expr() as error):
            return [error]
        case ast.Assert(msg=ast.expr() as message):
            return [message]
        case ast.Call(func=ast.Attribute(attr=method)) if method in LOG_METHODS:
            return [*node.args, *(keyword.value for keyword in node.keywords)]
        case ast.Call():
            helps = [keyword.value for keyword in node.keywords if keyword.arg in HELP_ARGUMENTS]
            return [*helps, *(node.args if ast.unparse(node.func).rpartition(".")[2][:1].isupper() else ())]
    return []


def _test_names(text: str) -> Iterator[Passage]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Passage(node.lineno, "name", node.name)


CPP_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)


def _cpp_comments(text: str) -> Iterator[Passage]:
    found = []
    for match in CPP_TOKEN.finditer(text):
        if match[0].startswith("/"):
            line = text.count("\n", 0, match.start()) + 1
            stands_alone = not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
            comment = match[0].removeprefix("//").removeprefix("/*").removesuffix("*/").strip()
            found.append((line, stands_alone, comment))
    yield from _blocks(found)


def without_cpp_comments(text: str) -> str:
    """The text with a space for each comment."""
    return CPP_TOKEN.sub(lambda match: " " if match[0].startswith("/") else match[0], text)


def _paragraphs(text: str) -> Iterator[Passage]:
    """Blocks of lines between blank lines, without fenced code."""
    block: list[str] = []
    fenced = False
    lines = text.splitlines()
    for number, line in enumerate([*lines, ""], 1):
        is_fence = line.lstrip().startswith("```")
        fenced ^= is_fence
        if line.strip() and not fenced and not is_fence:
            block.append(line)
        elif block:
            yield Passage(number - len(block), "text", "\n".join(block))
            block = []
