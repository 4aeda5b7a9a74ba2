"""Writes small encoders with random weights, and the hidden states that `transformers` computes with them, one input at a time."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from small import encoder
from texts import NEW, is_clear, shaken
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CamembertConfig,
    CamembertModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.models.whisper.modeling_whisper import sinusoids

directory = Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)  # small products are faster in one


def expect(name, model, inputs, layers, states_of):
    """The last hidden states of each input, and those after so many layers."""
    states = {layer: [] for layer in ["last", *layers]}
    for value in inputs:
        with torch.no_grad():
            output = states_of(model, value)
        states["last"].append(output.last_hidden_state)
        for layer in layers:
            states[layer].append(output.hidden_states[layer])
    rounded = {
        layer: [[float(f"{number:.7g}") for number in value.flatten()] for value in values]
        for layer, values in states.items()
    }
    expected = {"inputs": [value[0].tolist() for value in inputs], "states": rounded}
    (directory / name / "expected.json").write_text(json.dumps(expected) + "\n")


def texts():
    texts = [torch.randint(3, 50, (1, length)) for length in (4, 12, 1, 9)]
    texts[1][0, 5] = 1  # a token of padding within a text, which RoBERTas do not count
    return texts


def of_text(model, tokens):
    return model(tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)


def of_image(model, image):
    return model(image, output_hidden_states=True)


roberta = encoder | dict(max_position_embeddings=14, layer_norm_eps=1e-5, attention_probs_dropout_prob=0.2)
families = {
    "bert": (BertModel, BertConfig(**encoder, max_position_embeddings=12)),
    "bert_classifier": (BertForSequenceClassification, BertConfig(**encoder, max_position_embeddings=12)),
    "roberta": (RobertaForMaskedLM, RobertaConfig(**roberta, type_vocab_size=1)),
    "roberta_padding": (RobertaForMaskedLM, RobertaConfig(**roberta, pad_token_id=0)),
    "xlm_roberta": (XLMRobertaModel, XLMRobertaConfig(**roberta, type_vocab_size=1)),
    "camembert": (CamembertModel, CamembertConfig(**roberta, type_vocab_size=1)),
}
for name, (make, config) in families.items():
    model = shaken(make, config)
    model.save_pretrained(directory / name)
    expect(name, model.base_model, texts(), [0, 1, 2], of_text)

vit = {key: value for key, value in encoder.items() if key != "vocab_size"}
families = {
    "vit": (ViTForImageClassification, ViTConfig(**vit, image_size=12, patch_size=4)),
    "vit_wide": (ViTModel, ViTConfig(**vit, image_size=[8, 13], patch_size=[4, 2], num_channels=1, qkv_bias=False)),
}
for name, (make, config) in families.items():
    model = shaken(make, config)
    model.save_pretrained(directory / name)
    height, width = config.image_size if name == "vit_wide" else (12, 12)
    images = [torch.randn(1, config.num_channels, height, width) for _ in range(3)]
    expect(name, model.base_model, images, [0, 1, 2], of_image)

    save_file({"images": torch.cat(images)}, directory / name / "images.safetensors")

# With the names of checkpoints of older and newer versions, whichever the installed one writes.
OLD = {
    "encoder.layer.": "layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
make, config = families["vit"]
for name in "vit_old", "vit_new":
    model = shaken(make, config)
    config.save_pretrained(directory / name)
    state = {}
    for key, tensor in model.state_dict().items():
        for old, new in OLD.items():
            key = key.replace(old, new)
        if name == "vit_old":
            for old, new in OLD.items():
                key = key.replace(new, old)
        state[key] = tensor
    torch.save(state, directory / name / "pytorch_model.bin")
    expect(name, model.base_model, [torch.randn(1, 3, 12, 12)], [1], of_image)


def answers_of(model, questions, prompts):
    """What follows a prompt, one question at a time."""
    answers = []
    for question, prompt in zip(questions, prompts):
        text = torch.tensor([prompt])
        with torch.no_grad():
            encoded = model.get_encoder()(question)
            for _ in range(NEW):
                logits = model(encoder_outputs=encoded, decoder_input_ids=text).logits
                text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
            logits = model(encoder_outputs=encoded, decoder_input_ids=text[:, :-1]).logits[0]
        # How much larger the largest logits are than any others: with less than rounding, either could be chosen.
        top = logits[len(prompt) - 1 :].topk(2).values
        answers.append(
            {
                "question": question[0].tolist(),
                "prompt": prompt,
                "answer": text[0, len(prompt) :].tolist(),
                "margin": (top[:, 0] - top[:, 1]).min().item() / logits.abs().max().item(),
                "last_logits": [float(f"{value:.7g}") for value in logits[-1].tolist()],
            }
        )
    return answers


# Few classes of distances, so that texts are long enough for the last one.
t5 = dict(
    vocab_size=50,
    d_model=24,
    d_kv=8,
    d_ff=40,
    num_heads=4,
    num_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    decoder_start_token_id=0,
    eos_token_id=None,
)
gated = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_layers=3, num_decoder_layers=2)
families = {"t5": T5Config(**t5), "t5_gated": T5Config(**(t5 | gated)), "t5_head": T5Config(**t5)}
for name, config in families.items():
    while True:
        model = shaken(T5ForConditionalGeneration, config)
        if name != "t5":
            # Of its own.
            model.lm_head.weight = torch.nn.Parameter(torch.randn(50, 24))
        questions = [torch.randint(2, 50, (1, length)) for length in (9, 30, 1)]
        if is_clear(answers := answers_of(model, questions, [[0]] * 3)):
            break
    config.save_pretrained(directory / name)
    torch.save(model.state_dict(), directory / name / "pytorch_model.bin")
    again = T5ForConditionalGeneration.from_pretrained(directory / name)
    inputs = dict(input_ids=questions[0], decoder_input_ids=questions[1])
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    expect(name, model.encoder, texts(), range(config.num_layers + 1), of_text)
    (directory / name / "answers.json").write_text(json.dumps(answers) + "\n")

model = shaken(T5EncoderModel, T5Config(**t5))
model.save_pretrained(directory / "encoder")
expect("encoder", model, texts(), [0, 1, 2], of_text)

whisper = WhisperConfig(
    vocab_size=50,
    num_mel_bins=6,
    d_model=24,
    encoder_layers=2,
    encoder_attention_heads=3,
    encoder_ffn_dim=40,
    decoder_layers=3,
    decoder_attention_heads=4,
    decoder_ffn_dim=32,
    max_source_positions=10,
    max_target_positions=80,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
    decoder_start_token_id=2,
)
while True:
    model = shaken(WhisperForConditionalGeneration, whisper)
    sounds = [torch.randn(1, 6, 20) for _ in range(3)]
    if is_clear(answers := answers_of(model, sounds, [[2, 7, 9], [2, 8], [2, 3, 11, 4]])):
        break
model.save_pretrained(directory / "whisper")
expect("whisper", model.get_encoder(), sounds, [0, 1, 2], of_image)
(directory / "whisper" / "answers.json").write_text(json.dumps(answers) + "\n")
(directory / "whisper" / "sinusoids.json").write_text(json.dumps(sinusoids(10, 24).flatten().tolist()) + "\n")


def resized(height, width, size):
    """As `transformers` does it, by torchvision."""
    image = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8)
    image[..., : height // 2, :] //= 128
    small = torch.nn.functional.interpolate(image, size, mode="bilinear", antialias=True)
    in_rows = [of[0].permute(1, 2, 0).flatten().tolist() for of in (image, small)]
    return {"from": [height, width], "to": size, "image": in_rows[0], "resized": in_rows[1]}


sizes = [(20, 13, [12, 12]), (5, 7, [12, 10]), (12, 30, [12, 12]), (9, 12, [4, 12])]
(directory / "resized.json").write_text(json.dumps([resized(*size) for size in sizes]) + "\n")
