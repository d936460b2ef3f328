"""Run by another process, with transformers on its path; does a list of jobs, since to import it takes long.

    python with_transformers.py JOBS.json

A job is {"class", "directory", "tokens", "out"}: load a model and compute. With "config" the model is made first, with
random weights, and saved to the directory; "own_head" gives it logits of its own, whatever transformers would tie. "out" gets
the result (logits; of an encoder alone the last hidden state) and, as JSON text, the version and the loader's report.
Nothing of t5ckpt is imported here.
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import transformers


def make(job: dict[str, Any]) -> None:
    """Makes a model with random weights, large enough to matter, and saves it."""
    cls = getattr(transformers, job['class'])
    model = cls(cls.config_class(**job['config']))
    if job['own_head']:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if 'layer_norm' in name:
                parameter.mul_(0.1).add_(1)
            elif 'shared' not in name and 'bias' not in name:
                parameter.mul_(0.25)
    model.save_pretrained(job['directory'], safe_serialization=True)


def run(job: dict[str, Any]) -> None:
    """Loads a model and computes."""
    cls = getattr(transformers, job['class'])
    model, report = cls.from_pretrained(job['directory'], output_loading_info=True, use_safetensors=True)
    model.eval()
    given = {key: torch.from_numpy(value) for key, value in np.load(job['tokens']).items()}
    with torch.no_grad():
        if job['class'].endswith('EncoderModel'):
            result = model(input_ids=given['inputs']).last_hidden_state
        else:
            result = model(input_ids=given['inputs'], decoder_input_ids=given['targets']).logits
    facts = {'version': transformers.__version__} | {key: sorted(map(str, value)) for key, value in report.items()}
    np.savez(job['out'], result=result.float().numpy(), facts=np.asarray(json.dumps(facts)))


torch.set_num_threads(1)
for item in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    if 'config' in item:
        make(item)
    run(item)
