"""Make a small text set and a tokenizer for it, without a network, in two seconds.

    python titan/make_assets.py --output .titan

    .titan/tokenizer   --hf_assets_path           byte-level BPE of 2,048 tokens, the debug models' vocabulary
    .titan/c4_test     --dataloader.dataset_path  documents as TorchTitan's c4_test has them

The text is the Python reference that every Python brings along for help(): pydoc_data.topics. It
differs between versions of Python, and with it the losses; within one version all is deterministic,
which the printed checksum lets you see. TorchTitan's wheel has no test assets, and its c4 and the
real tokenizers need a network; the code path is the same for both.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
VOCABULARY = 2048
DOCUMENT_CHARACTERS = 2000


def documents() -> list[str]:
    """Return the text of help()'s topics in documents of whole paragraphs, about 2,000 characters each."""
    from pydoc_data.topics import topics

    texts = []
    for name in sorted(topics):
        text = ""
        for paragraph in topics[name].split("\n\n"):
            text += paragraph + "\n\n"
            if len(text) > DOCUMENT_CHARACTERS:
                texts.append(text.strip())
                text = ""
        if text.strip():
            texts.append(text.strip())
    return texts


def write_tokenizer(texts: list[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the texts and write it as Hugging Face does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one order of counting, one result
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END}))


def write_documents(texts: list[str], folder: Path) -> None:
    """Write the texts in the form of c4: one JSON object with the key text per line."""
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def checksum(folder: Path) -> str:
    """Return the first 16 digits of the SHA-256 over all files of the two folders, in order of name."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("tokenizer/*")) + sorted(folder.glob("c4_test/*.jsonl")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Make the assets unless they are there; say what they are."""
    parser = argparse.ArgumentParser(description="Make a text set and a tokenizer without a network.")
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the options\n")
    parser.add_argument(
        "--output", type=Path, default=Path(".titan"), help="folder of both (default: .titan)"
    )
    output = parser.parse_args().output
    data = output / "c4_test" / "data.jsonl"
    marker = output / ".made-by-make_assets"
    maker = hashlib.sha256(sys.version.encode() + Path(__file__).read_bytes()).hexdigest()
    made = marker.is_file() and marker.read_text() == maker
    if not (made and data.is_file() and (output / "tokenizer" / "tokenizer.json").is_file()):
        taken = [name for name in ("tokenizer", "c4_test") if (output / name).exists()]
        if taken and not marker.is_file():
            print(f"error: {output / taken[0]} was not made here: name another --output", file=sys.stderr)
            return 2
        try:
            texts = documents()
        except ImportError:
            print("error: this Python has no pydoc_data.topics, the text of help()", file=sys.stderr)
            return 2
        output.mkdir(parents=True, exist_ok=True)
        marker.write_text("")  # ours, and not complete
        with tempfile.TemporaryDirectory(dir=output) as new:
            write_tokenizer(texts, Path(new) / "tokenizer")
            write_documents(texts, Path(new) / "c4_test")
            for name in ("tokenizer", "c4_test"):
                shutil.rmtree(output / name, ignore_errors=True)
                (Path(new) / name).rename(output / name)
        marker.write_text(maker)
    count = sum(1 for _ in data.open())
    print(
        f"== {output}: {count} documents, {VOCABULARY} tokens in the vocabulary, checksum {checksum(output)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
