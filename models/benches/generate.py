"""What `cargo bench -p burn-memsave-models --bench generate` needs of Python.

    generate.py make DIRECTORY                          writes a random model of 1.6 GiB in bf16
    generate.py time DIRECTORY THREADS PROMPT TOKENS    prints the tokens per second of `transformers`, in memory and offloaded to disk
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


def tokens_per_second(model, prompt, tokens):
    """After the first token, which takes as long as the prompt."""

    def seconds(new):
        begin = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=new, max_new_tokens=new)
        return time.perf_counter() - begin

    seconds(1)
    # The fastest of two, as of ours.
    return tokens / (min(seconds(1 + tokens) for _ in range(2)) - min(seconds(1) for _ in range(2)))


def main(what, directory, threads=1, prompt=32, tokens=16):
    if what == "make":
        return make(directory)
    torch.set_num_threads(int(threads))
    prompt = 10 + torch.arange(int(prompt))[None] * 37 % 1000
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    print(f"in memory: {tokens_per_second(model, prompt, int(tokens)):.2f} tokens/s")
    with tempfile.TemporaryDirectory() as offloaded:
        disk_offload(model, offloaded, execution_device="cpu")
        print(f"offloaded to disk: {tokens_per_second(model, prompt, int(tokens)):.2f} tokens/s")


main(*sys.argv[1:])
