"""The facts in the manifest of a step on disk, for tests that change, lose or move them."""

import pathlib

from t5ckpt.format.manifest import file_with_facts, split_facts


def facts_of(step_dir: pathlib.Path) -> bytes:
    """The text of the facts."""
    facts = split_facts((step_dir / 'checkpoint').read_bytes())[1]
    assert facts is not None
    return facts


def put_facts(step_dir: pathlib.Path, facts: bytes | None) -> None:
    """Replaces the facts; None leaves them out, as in a manifest that T5X has written."""
    path = step_dir / 'checkpoint'
    path.write_bytes(file_with_facts(split_facts(path.read_bytes())[0], facts))


def as_earlier_layout(step_dir: pathlib.Path, name: str = 't5ckpt.json') -> None:
    """Moves the facts into a file beside the manifest, where earlier versions of t5ckpt put them."""
    (step_dir / name).write_bytes(facts_of(step_dir))
    put_facts(step_dir, None)


def as_t5x_writes(step_dir: pathlib.Path) -> None:
    """Leaves out the facts and the file checksums, which T5X does not have."""
    put_facts(step_dir, None)
    for path in step_dir.glob('integrity.*.json'):
        path.unlink()
