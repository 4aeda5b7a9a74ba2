"""Sizes of networks for tests."""

encoder = dict(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_attention_heads=3, num_hidden_layers=2
)
decoder = dict(
    vocab_size=50,
    hidden_size=48,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=2,
    num_hidden_layers=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
