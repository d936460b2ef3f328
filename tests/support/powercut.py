"""What a disk may hold after a power cut, computed from the recorded calls of a real run (as in ALICE, OSDI 2014).

The model is harsher than any file system in use: a change is on the disk for sure only when the file or the directory that
it changed was fsynced afterwards. Every other change made before the cut is there or not, in any combination: an entry
without its data, data of which only some 512-byte blocks have come, a rename without the creation before it. Only one thing
is atomic: one rename, link, or entry.

Pure: it computes trees as `{path: bytes or None}`, None for a directory, and touches no file.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Callable, Iterator, Sequence

from support.faultshim import Operation

_SECTOR = 512
_ROOT = 0


@dataclasses.dataclass
class _Node:
    """A file or a directory, as the program sees it."""

    is_dir: bool
    names: dict[str, int] = dataclasses.field(default_factory=dict)
    size: int = 0


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of the disk.

    Attributes:
      at: index of the operation.
      nodes: what must be fsynced to make it last.
      names: directory, name and node (None: taken away), all at once.
      data: file, offset and bytes.
      size: file and its new size.
    """

    at: int
    nodes: tuple[int, ...]
    names: tuple[tuple[int, str, int | None], ...] = ()
    data: tuple[int, int, bytes] | None = None
    size: tuple[int, int] | None = None


Tree = dict[str, bytes | None]


class Recording:
    """The changes of a run, and the tree before it."""

    def __init__(self, before: Tree, links: dict[str, str], operations: Sequence[Operation]) -> None:
        """Follows the operations.

        Args:
          before: the tree on disk, durable; the root is not in it.
          links: path to the path, in `before`, that is another name of the same file.
          operations: as recorded, paths with a leading '/'.
        """
        self._nodes = [_Node(True)]
        self._initial: dict[int, bytes] = {}
        self.changes: list[Change] = []
        self.synced: list[tuple[int, int]] = []
        self.returned = len(operations)
        for path in sorted(before):
            if path in links:
                self._put(path, self._find(links[path]))
            else:
                content = before[path]
                node = self._new(content is None)
                self._put(path, node)
                if content is not None:
                    self._initial[node] = content
                    self._nodes[node].size = len(content)
        self._initial_names = {index: dict(node.names) for index, node in enumerate(self._nodes) if node.is_dir}
        self.length = len(operations)
        for at, operation in enumerate(operations):
            self._follow(at, operation)

    def _new(self, is_dir: bool) -> int:
        self._nodes.append(_Node(is_dir))
        return len(self._nodes) - 1

    def _find(self, path: str) -> int:
        node = _ROOT
        for part in filter(None, path.split('/')):
            node = self._nodes[node].names[part]
        return node

    def _parent(self, path: str) -> tuple[int, str]:
        above, _, name = path.strip('/').rpartition('/')
        return self._find(above), name

    def _put(self, path: str, node: int) -> tuple[int, str, int]:
        directory, name = self._parent(path)
        self._nodes[directory].names[name] = node
        return directory, name, node

    def _take(self, path: str) -> tuple[int, str, None]:
        directory, name = self._parent(path)
        del self._nodes[directory].names[name]
        return directory, name, None

    def _swap(self, path: str, other: str) -> tuple[tuple[int, str, int], tuple[int, str, int]]:
        one, two = self._find(path), self._find(other)
        return self._put(path, two), self._put(other, one)

    def _named(self, at: int, *names: tuple[int, str, int | None]) -> None:
        self.changes.append(Change(at, tuple(sorted({directory for directory, _, _ in names})), names))

    def _follow(self, at: int, operation: Operation) -> None:
        match operation.kind:
            case 'c' | 'd':
                if operation.path:
                    self._named(at, self._put(operation.path, self._new(operation.kind == 'd')))
            case 'r':
                node = self._find(operation.path)
                self._named(at, self._take(operation.path), self._put(operation.other, node))
            case 'x':
                self._named(at, *self._swap(operation.path, operation.other))
            case 'l':
                self._named(at, self._put(operation.other, self._find(operation.path)))
            case 'u':
                self._named(at, self._take(operation.path))
            case 't':
                node = self._find(operation.path)
                self.changes.append(Change(at, (node,), size=(node, operation.offset)))
            case 'w':
                node = self._find(operation.path)
                self.changes.append(Change(at, (node,), data=(node, operation.offset, operation.data)))
            case 's':
                self.synced.append((at, self._find(operation.path)))
            case '!':
                self.returned = at
            case _:
                raise ValueError(f'cannot replay {operation.kind!r}')

    def uncertain(self, cut: int) -> list[Change]:
        """What may or may not be on the disk when the power goes after `cut` operations."""
        last = {node: at for at, node in self.synced if at < cut}
        return [
            change
            for change in self.changes
            if change.at < cut and not all(last.get(node, -1) > change.at for node in change.nodes)
        ]

    def tree(self, cut: int, lost: Callable[[Change], Change | None]) -> Tree:
        """The tree after a cut; `lost` says what became of an uncertain change: the same, torn, or None."""
        uncertain = {change.at for change in self.uncertain(cut)}
        names = {index: dict(entries) for index, entries in self._initial_names.items()}
        files = {node: bytearray(content) for node, content in self._initial.items()}
        for change in self.changes:
            if change.at >= cut:
                break
            kept = lost(change) if change.at in uncertain else change
            if kept is not None:
                _apply(kept, names, files)
        return dict(self._walk(_ROOT, '', names, files))

    def _walk(
        self, node: int, path: str, names: dict[int, dict[str, int]], files: dict[int, bytearray]
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, child in sorted(names.get(node, {}).items()):
            below = f'{path}/{name}'
            if self._nodes[child].is_dir:
                yield below, None
                yield from self._walk(child, below, names, files)
            else:
                yield below, bytes(files.get(child, b''))


def _apply(change: Change, names: dict[int, dict[str, int]], files: dict[int, bytearray]) -> None:
    for directory, name, node in change.names:
        entries = names.setdefault(directory, {})
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node
    if change.size is not None:
        node, size = change.size
        content = files.setdefault(node, bytearray())
        del content[size:]
        content.extend(bytes(size - len(content)))
    if change.data is not None:
        node, offset, data = change.data
        content = files.setdefault(node, bytearray())
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset : offset + len(data)] = data


def _torn(change: Change, keep: Callable[[int], bool]) -> Change:
    """The file has its size, but only some sectors of the data have come; the others are zeros."""
    if change.data is None:
        return change
    node, offset, data = change.data
    parts = [data[start : start + _SECTOR] for start in range(0, len(data), _SECTOR)]
    kept = b''.join(part if keep(index) else bytes(len(part)) for index, part in enumerate(parts))
    return dataclasses.replace(change, data=(node, offset, kept))


def trees(recording: Recording, randoms: int, seed: int) -> Iterator[tuple[int, Tree]]:
    """Every cut with the extremes, and `randoms` random combinations for each; equal ones once.

    Yields:
      How many operations had been made, and the tree.
    """
    source = random.Random(seed)
    seen: set[tuple[bool, int]] = set()

    def at_random(change: Change) -> Change | None:
        fate = source.random()
        if fate < 0.4:
            return None
        return change if fate < 0.7 else _torn(change, lambda _: source.random() < 0.5)

    fates: list[Callable[[Change], Change | None]] = [
        lambda change: None,
        lambda change: change,
        lambda change: change if change.names else None,
        lambda change: None if change.names else change,
        lambda change: _torn(change, lambda index: index % 2 == 0),
        lambda change: _torn(change, lambda _: False),
        *[at_random] * randoms,
    ]
    for cut in range(recording.length + 1):
        for fate in fates:
            tree = recording.tree(cut, fate)
            key = (cut > recording.returned, hash(frozenset(tree.items())))
            if key not in seen:
                seen.add(key)
                yield cut, tree


def read_tree(root: pathlib.Path) -> tuple[Tree, dict[str, str]]:
    """A directory as a tree, and which of its names are second names of a file."""
    tree: Tree = {}
    links: dict[str, str] = {}
    first: dict[int, str] = {}
    for path in sorted(root.rglob('*')) if root.exists() else []:
        name = '/' + path.relative_to(root).as_posix()
        tree[name] = None if path.is_dir() else path.read_bytes()
        if path.is_file():
            inode = path.stat().st_ino
            if inode in first:
                links[name] = first[inode]
            first.setdefault(inode, name)
    return tree, links


def write_tree(root: pathlib.Path, tree: Tree) -> None:
    """Makes a directory of a tree."""
    root.mkdir(parents=True)
    for name, content in tree.items():
        path = root / name.lstrip('/')
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
