"""The demo model as a directory that vLLM and `transformers` load: made here, never downloaded.

Its weights are the trained ones of the package, or random where the package has none.
"""

from __future__ import annotations

import errno
import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import platformdirs

from holdfast.demo import ARCHITECTURE, tokenizer, trained, weights
from holdfast.demo.switches import CONFIG_KEY, DEFAULT_SWITCHES, DemoSwitches
from holdfast.demo.tokenizer import (
    BOS_ID,
    EOS_ID,
    IM_END_ID,
    PAD_ID,
    VOCABULARY_SIZE,
    write_tokenizer,
)
from holdfast.demo.trained import (
    RECORD,
    TRAINED_DIRECTORY,
    WEIGHTS_FILE,
    Shape,
    copy_trained,
    is_trained,
    trained_shape,
)

MAX_MODEL_TOKENS = 8192
NORM_EPSILON = 1e-5
ROTARY_BASE = 10_000.0
_MANIFEST = "holdfast_demo.json"
"""Written last: the size of every other file."""
_INSTALL_ATTEMPTS = 5
_RECIPE = (__file__, tokenizer.__file__, trained.__file__, weights.__file__)


def demo_directory() -> Path:
    """Where demo models are kept unless told otherwise: in the cache of this user."""
    return platformdirs.user_cache_path("holdfast") / "models"


def ensure_demo_model(
    directory: Path,
    switches: DemoSwitches = DEFAULT_SWITCHES,
    trained_directory: Path = TRAINED_DIRECTORY,
) -> Path:
    """The complete model with `switches`, in a directory of its own below `directory`.

    It is made if it is not there or lacks a file. It appears at once and whole, so that processes
    may race for it; one that is there is not written to. Its weights are those in
    `trained_directory`, or random if there are none.
    """
    target = directory / f"demo-{_digest(switches, trained_directory)}"
    if _is_complete(target):
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}-", dir=directory) as staging:
        made = Path(staging) / "model"
        made.mkdir()
        _write_model(made, switches, trained_directory)
        _install(made, target)
    return target


def _digest(switches: DemoSwitches, trained_directory: Path) -> str:
    """Names the switches, the code that writes the files and the training: all make the model."""
    recipe = b"".join(Path(source).read_bytes() for source in _RECIPE)
    if is_trained(trained_directory):
        recipe += (trained_directory / RECORD).read_bytes()
    record = json.dumps(switches.to_record(), sort_keys=True)
    return hashlib.sha256(recipe + record.encode()).hexdigest()[:12]


def _is_complete(model: Path) -> bool:
    try:
        sizes = json.loads((model / _MANIFEST).read_text())
        return all((model / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, ValueError):
        return False


def _install(made: Path, target: Path) -> None:
    """Move `made` to `target`; a whole model that another process put there is left alone."""
    for attempt in range(_INSTALL_ATTEMPTS):
        try:
            made.rename(target)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
        else:
            return
        if _is_complete(target):
            return
        with suppress(FileNotFoundError):
            target.rename(made.parent / f"incomplete-{attempt}")
    raise FileExistsError(errno.EEXIST, "other processes keep making it incomplete", str(target))


def _write_model(directory: Path, switches: DemoSwitches, trained_directory: Path) -> None:
    if is_trained(trained_directory):
        copy_trained(trained_directory, directory)
        shape = trained_shape(trained_directory)
    else:
        _write_random(directory)
        shape = weights.SHAPE
    _write_json(directory / "config.json", _configuration(switches, shape))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": PAD_ID},
    )
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    _write_json(directory / _MANIFEST, sizes)


def _write_random(directory: Path) -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415 - only the first use needs it

    save_file(
        dict(weights.make_weights()), str(directory / WEIGHTS_FILE), metadata={"format": "pt"}
    )
    write_tokenizer(directory, MAX_MODEL_TOKENS)


def _configuration(switches: DemoSwitches, shape: Shape) -> dict[str, Any]:
    """A Llama configuration: `transformers` loads the same weights as LlamaForCausalLM."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY_SIZE,
        **asdict(shape),
        "hidden_act": "silu",
        "max_position_embeddings": MAX_MODEL_TOKENS,
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        CONFIG_KEY: switches.to_record(),
    }


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2))
