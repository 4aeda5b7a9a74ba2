"""Writes GGUF files with small tokenizers, and what Python's own make of some texts."""

import json
import sys
from pathlib import Path

import gguf
import numpy
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

directory = Path(sys.argv[1])
TEXTS = [
    "Hello world!",
    " It's 12345 o'clock,\n\n\tand we'LL see  what   happens ...  ",
    "Grüße aus München: naïve café, Ελλάδα, привет, 日本語 🦀🦀",
    "fn main() { println!(\"{}\", 1 + 22 * 333); }\r\n",
    "",
]
CORPUS = [text * 3 for text in TEXTS] + ["the quick brown fox sees what the lazy dog sees " * 5] * 4
# Letters that no tokenizer has learned.
UNSEEN = ["snow ☃ and 你好, ŝø"]
SPECIAL = ["<|begin|>", "<|end|>"]
TAIL = r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+" + TAIL
LLAMA_3 = QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def write(name, kind, tokens, types, first, fill):
    writer = gguf.GGUFWriter(directory / f"{name}.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(first)
    fill(writer)
    writer.add_tensor("nothing", numpy.zeros(32, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expect(name, encode, decode):
    texts = [dict(text=text, ids=encode(text), decoded=decode(encode(text))) for text in TEXTS + UNSEEN]
    (directory / f"{name}.json").write_text(json.dumps(texts))


for name, pattern in ("llama-bpe", LLAMA_3), ("qwen2", QWEN_2), ("gpt-2", None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if name == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]

    def fill(writer):
        writer.add_tokenizer_pre(name)
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        # That of Llama 3 has a first token without saying so.

    write(name, "gpt2", tokens, types, tokenizer.token_to_id("<|begin|>"), fill)
    expect(name, lambda text: tokenizer.encode(text).ids, lambda ids: tokenizer.decode(ids))

(directory / "corpus.txt").write_text("\n".join(CORPUS))
for prefix in True, False:
    name = "pieces" if prefix else "pieces_without_prefix"
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "corpus.txt"),
        model_prefix=str(directory / name),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / f"{name}.model"))
    count = range(pieces.vocab_size())

    def type_of(id):
        kinds = [(pieces.is_byte, "BYTE"), (pieces.is_control, "CONTROL"), (pieces.is_unknown, "UNKNOWN")]
        return next((gguf.TokenType[kind] for is_it, kind in kinds if is_it(id)), gguf.TokenType.NORMAL)

    def fill(writer):
        writer.add_token_scores([pieces.get_score(id) for id in count])
        writer.add_unk_token_id(pieces.unk_id())
        writer.add_add_space_prefix(prefix)

    write(name, "llama", [pieces.id_to_piece(id) for id in count], [type_of(id) for id in count], pieces.bos_id(), fill)
    # As in `tokenizers`, nothing is put before a text that is empty.
    expect(name, lambda text: [pieces.bos_id()] + pieces.encode(text), lambda ids: pieces.decode(ids[1:]))
