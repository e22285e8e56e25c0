"""Fork bombs: functions and loops that start processes without an end, by the shape of the text alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

_DEEPEST = 60
_LEAVING = (b"return", b"exit", b"break", b"continue")
_FOREVER = (b"true", b":", b"[ 1 ]", b"((1))", b"(( 1 ))")


def found_in(root: Node) -> list[str]:
    """The names of functions that always start themselves again beside themselves, and such loops."""
    bodies, loops = {}, []
    for node in nodes(root):
        if node.type == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None and name.text is not None:
                bodies[name.text] = body
        elif node.type in ("while_statement", "c_style_for_statement") and _is_endless(node):
            loops.append("loop")
    calls = {name: set(_calls(body, False, 0)) for name, body in bodies.items()} if bodies else {}
    return [name.decode(errors="replace") for name in calls if _comes_back(name, calls)] + loops


def nodes(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.named_children


def _comes_back(name: bytes, calls: dict[bytes, set[tuple[bytes, bool]]]) -> bool:
    """Whether it leads to itself over at least one call that does not wait, or forks."""
    seen: set[tuple[bytes, bool]] = set()
    waiting = [(name, False)]
    while waiting:
        caller, apart = waiting.pop()
        for callee, forks in calls.get(caller, ()):
            step = (callee, apart or forks)
            if step == (name, True):
                return True
            if step not in seen:
                seen.add(step)
                waiting.append(step)
    return False


def _calls(node: Node, apart: bool, depth: int) -> Iterator[tuple[bytes, bool]]:
    """What is called whenever this runs, and whether in a process of its own."""
    if depth > _DEEPEST:
        return
    match node.type:
        case "command":
            name = node.child_by_field_name("name")
            if name is not None and name.text is not None:
                yield name.text, apart
            for child in node.named_children:
                yield from _substitutions(child, depth + 1)
        case "pipeline":
            for child in node.named_children:
                yield from _calls(child, True, depth + 1)
        case "list":
            yield from _calls(node.named_children[0], apart, depth + 1)
        case "subshell":
            yield from _sequence(node, True, depth + 1)
        case "compound_statement" | "do_group" | "redirected_statement" | "negated_command":
            yield from _sequence(node, apart, depth + 1)
        case "for_statement" | "c_style_for_statement":
            body = node.child_by_field_name("body")
            if body is not None:
                yield from _calls(body, apart, depth + 1)
        case "while_statement" if _is_forever(node):
            body = node.child_by_field_name("body")
            if body is not None:
                yield from _calls(body, apart, depth + 1)


def _sequence(node: Node, apart: bool, depth: int) -> Iterator[tuple[bytes, bool]]:
    for child in node.named_children:
        if leaves(child):
            return  # perhaps it ends here
        yield from _calls(child, apart or in_background(child), depth)


def _substitutions(node: Node, depth: int) -> Iterator[tuple[bytes, bool]]:
    for each in nodes(node):
        if each.type in ("command_substitution", "process_substitution"):
            yield from _sequence(each, True, depth)


def _is_forever(node: Node) -> bool:
    if node.type == "c_style_for_statement":
        return node.child_by_field_name("condition") is None
    condition = node.child_by_field_name("condition")
    wanted = _FOREVER if node.children[0].type == "while" else (b"false",)
    return condition is not None and condition.text in wanted


def _is_endless(node: Node) -> bool:
    """A loop without an end that waits for nothing it starts."""
    body = node.child_by_field_name("body")
    if body is None or not _is_forever(node):
        return False
    statements = [child for child in body.children if child.is_named and child.type != "comment"]
    return bool(statements) and all(map(in_background, statements))


def leaves(statement: Node) -> bool:
    """Whether the shell, the function or the loop may end in there."""
    return any(each.type == "command_name" and each.text in _LEAVING for each in nodes(statement))


def in_background(statement: Node) -> bool:
    following = statement.next_sibling
    return following is not None and following.type == "&"
