"""What `cargo bench -p burn-memsave-models --bench generate` needs of Python.

    generate.py make DIRECTORY                          writes a random model of 1.6 GiB in bf16
    generate.py pack DIRECTORY FILE KIND                writes a random model of the same size in GGUF, its matrices in blocks of this kind
    generate.py time DIRECTORY THREADS PROMPT TOKENS    prints the tokens per second of `transformers`, in memory and offloaded to disk
    generate.py llama_cpp FILE THREADS PROMPT TOKENS    prints those of `llama.cpp` with a file in GGUF (package `xllamacpp`)
"""

import sys
import tempfile
import time

import torch
from accelerate import disk_offload
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def make(directory):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def pack(directory, path, kind):
    """Random blocks whose elements are about as small as weights."""
    import gguf
    import numpy

    numbers = numpy.random.default_rng(0)
    config = LlamaConfig.from_pretrained(directory)
    width, hidden, count = config.hidden_size, config.intermediate_size, config.vocab_size
    keys = width * config.num_key_value_heads // config.num_attention_heads
    halves = {"Q8_0": [0], "Q4_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[kind]
    largest = {"Q8_0": 128, "Q4_0": 8, "Q4_K": 64 * 16, "Q6_K": 128 * 32}[kind]
    kind = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width // config.num_attention_heads)
    # What `llama.cpp` asks of every file.
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{index:02X}>" if index < 256 else f"token{index}" for index in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([6 if index < 256 else 1 for index in range(count)])

    def matrix(name, rows, columns):
        blocks = numbers.integers(0, 256, (rows, columns // elements, size), dtype=numpy.uint8)
        for at in halves:
            scales = numpy.full(blocks.shape[:2], 0.04 / largest, dtype=numpy.float16)
            blocks[..., at : at + 2] = scales[..., None].view(numpy.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=kind)

    def norm(name):
        writer.add_tensor(name, numpy.ones(width, dtype=numpy.float32))

    matrix("token_embd.weight", count, width)
    for layer in range(config.num_hidden_layers):
        layer = f"blk.{layer}"
        norm(f"{layer}.attn_norm.weight")
        for name, rows, columns in [
            ("attn_q", width, width),
            ("attn_k", keys, width),
            ("attn_v", keys, width),
            ("attn_output", width, width),
            ("ffn_gate", hidden, width),
            ("ffn_up", hidden, width),
            ("ffn_down", width, hidden),
        ]:
            matrix(f"{layer}.{name}.weight", rows, columns)
        norm(f"{layer}.ffn_norm.weight")
    norm("output_norm.weight")
    matrix("output.weight", count, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def time_llama_cpp(path, threads, prompt, tokens):
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = path
    params.n_ctx = int(prompt) + int(tokens) + 8
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = Server(params)
    request = {
        "prompt": [10 + index * 37 % 1000 for index in range(int(prompt))],
        "n_predict": int(tokens) + 1,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    times = [server.handle_completions(request)["timings"] for _ in range(2)]
    assert all(time["predicted_n"] == int(tokens) + 1 for time in times)
    # The first token is there when the time begins.
    print(f"{int(tokens) / min(time['predicted_ms'] for time in times) * 1e3:.2f} tokens/s")


def tokens_per_second(model, prompt, tokens):
    """After the first token, which takes as long as the prompt."""

    def seconds(new):
        begin = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=new, max_new_tokens=new)
        return time.perf_counter() - begin

    seconds(1)
    # The fastest of two, as of ours.
    return tokens / (min(seconds(1 + tokens) for _ in range(2)) - min(seconds(1) for _ in range(2)))


def main(what, directory, *others):
    if what == "make":
        return make(directory)
    if what == "pack":
        return pack(directory, *others)
    if what == "llama_cpp":
        return time_llama_cpp(directory, *others)
    threads, prompt, tokens = others
    torch.set_num_threads(int(threads))
    prompt = 10 + torch.arange(int(prompt))[None] * 37 % 1000
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    print(f"in memory: {tokens_per_second(model, prompt, int(tokens)):.2f} tokens/s")
    with tempfile.TemporaryDirectory() as offloaded:
        disk_offload(model, offloaded, execution_device="cpu")
        print(f"offloaded to disk: {tokens_per_second(model, prompt, int(tokens)):.2f} tokens/s")


main(*sys.argv[1:])
