"""Make the data of this page from Python's own library.

    python3 make_data.py FOLDER

The script writes a file for each module to FOLDER/code, and chats to FOLDER/chats.jsonl. In a chat the user sends the
signature and docstring of a function, and the assistant answers with its body.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from pathlib import Path

OTHERS = {"site-packages", "dist-packages", "lib2to3"}


def chats(text: str, tree: ast.Module) -> list[dict]:
    """Return a chat for each function with a docstring and a body of 20 to 2,500 characters behind the docstring."""
    lines, found = text.splitlines(), []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or len(function.body) < 2:
            continue
        doc = ast.get_docstring(function)
        head = "\n".join(lines[function.lineno - 1 : function.body[0].lineno - 1]).strip()
        body = "\n".join(lines[function.body[1].lineno - 1 : function.end_lineno])
        if doc and len(doc) < 800 and 20 < len(body) < 2500:
            user, assistant = {"role": "user", "content": f"{head}\n{doc}"}, {"role": "assistant", "content": body}
            found.append({"messages": [user, assistant]})
    return found


def main(folder: Path) -> None:
    """Write code and chats of the running Python's library."""
    library, found = Path(sysconfig.get_paths()["stdlib"]), []
    (folder / "code").mkdir(parents=True, exist_ok=True)
    for path in sorted(library.rglob("*.py")):
        try:
            text = path.read_text("utf-8")
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        if len(text) >= 200 and not OTHERS & {*path.parts}:
            name = "--".join(path.relative_to(library).with_suffix(".txt").parts)
            (folder / "code" / name).write_text(text)
            found += chats(text, tree)
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
