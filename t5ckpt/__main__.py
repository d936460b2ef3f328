"""``python -m t5ckpt``."""

from __future__ import annotations

from t5ckpt.cli import main

if __name__ == '__main__':
    main()
