"""The tokens that `transformers` generates with small decoders, one prompt at a time."""

import json

import torch

NEW = 64
# Tensors are so small that other threads would only be waited for.
torch.set_num_threads(1)


def prompts():
    # 0 and 1 are padding.
    return [torch.randint(2, 50, (1, length)) for length in (9, 30, 1)]


def shaken(make, config):
    """A model with random weights."""
    model = make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def texts_of(model):
    texts = []
    for prompt in prompts():
        mask = torch.ones_like(prompt)
        text = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
        with torch.no_grad():
            logits = model(text).logits[0]
        # How much larger the largest logits are than any others: with less than rounding, either could be chosen.
        top = logits[prompt.shape[1] - 1 : -1].topk(2).values
        texts.append(
            {
                "prompt": prompt[0].tolist(),
                "text": text[0, prompt.shape[1] :].tolist(),
                "margin": (top[:, 0] - top[:, 1]).min().item() / logits.abs().max().item(),
                "last_logits": [float(f"{value:.7g}") for value in logits[-2].tolist()],
            }
        )
    return texts


def is_clear(texts):
    return min(text["margin"] for text in texts) >= 1e-4


def expect(directory, texts):
    (directory / "expected.json").write_text(json.dumps(texts) + "\n")


def with_clear_texts(make, config):
    while not is_clear(texts := texts_of(model := shaken(make, config))):
        pass
    return model, texts
