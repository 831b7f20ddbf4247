"""Tiny models of Transformers with random weights, random samples for each, and a plain training loop."""

import copy

import torch
import transformers
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, SAMPLES, BATCH = 48, 12, 22, 8  # the last batch has six samples
MAX_NORM, RATE = 0.5, 1e-2
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **TOKENS,
}


def gpt2(dropout=0.0, **more):
    """Return a GPT-2, whose head is its embedding."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS, **rates, **more))


def llama(dropout=0.0, **more):
    """Return a LLaMA with a head of its own."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, attention_dropout=dropout, **more))


def llama_tied(dropout=0.0, **more):
    """Return a LLaMA whose head is its embedding."""
    return llama(dropout, tie_word_embeddings=True, **more)


def mixtral(dropout=0.0, experts="eager", **more):
    """Return a Mixtral of 16 experts, of which a few samples use only some; grouped_mm computes in float32 only."""
    sizes = {"num_local_experts": 16, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**LLAMA, **sizes, attention_dropout=dropout, **more)
    )
    model.set_experts_implementation(experts)
    return model


def bert(dropout=0.0, **more):
    """Return a BERT with a head for masked tokens, whose weight is the embedding."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **layers, **rates, **more))


def t5(dropout=0.0, **more):
    """Return a T5, whose encoder, decoder and head share one embedding."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    starts = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    config = transformers.T5Config(**sizes, **starts, dropout_rate=dropout, **more)
    return transformers.T5ForConditionalGeneration(config)


def vit(dropout=0.0, **more):
    """Return a vision transformer for 12 x 12 pixels, with four classes."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "image_size": 12, "patch_size": 4, "num_labels": 4}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **layers, **rates, **more))


def whisper(dropout=0.0, **more):
    """Return a Whisper for 24 frames of 8 frequencies; its encoder's positions are frozen."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "num_mel_bins": 8, "max_source_positions": 12}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_target_positions": 32}
    starts = {"decoder_start_token_id": 1, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(**sizes, **layers, **widths, **TOKENS, **starts, dropout=dropout, **more)
    return transformers.WhisperForConditionalGeneration(config)


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "llama-tied": llama_tied,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "vit": vit,
    "whisper": whisper,
}
CAUSAL = ("gpt2", "llama", "llama-tied", "mixtral")


def make(name, dtype=torch.float64, seed=7, **options):
    """Return a model with the weights of a seed, in training mode."""
    torch.manual_seed(seed)
    return MODELS[name](**options).to(dtype).train()


class Samples(Dataset):
    """Random samples of a model, as the dicts of tensors that its ``forward`` takes."""

    def __init__(self, name, dtype=torch.float64, count=SAMPLES):
        self._columns, self._count = columns(name, dtype, count), count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return {key: column[index] for key, column in self._columns.items()}


def columns(name, dtype, count):
    """Return the inputs and labels of all samples."""
    chance = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=chance)
    if name == "vit":
        pixels = torch.randn(count, 3, 12, 12, generator=chance).to(dtype)
        return {"pixel_values": pixels, "labels": torch.randint(4, (count,), generator=chance)}
    # Every sample has its own length; the loss ignores the padding.
    lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=chance)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = tokens.masked_fill(mask == 0, -100)
    if name == "whisper":
        return {"input_features": torch.randn(count, 8, 24, generator=chance).to(dtype), "labels": labels}
    inputs = tokens.masked_fill(mask == 0, 0)
    if name == "bert":
        hidden = torch.rand(count, LENGTH, generator=chance) < 0.3
        labels = labels.masked_fill(~hidden, -100)
    if name == "t5":
        labels = labels.flip(0)
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


def loader(name, dtype=torch.float64):
    """Return the batches of all ranks together, in a fixed order."""
    return DataLoader(Samples(name, dtype), batch_size=BATCH)


def sum_and_count(name, model, batch):
    """Return the sum of the losses of all tokens that are not padding, and their number."""
    logits, labels = model(**batch).logits.double(), batch["labels"]
    if name in CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def trained(parameters):
    """Return an optimizer of the parameters that are not frozen; its eps keeps rounding in tiny gradients small."""
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=RATE, eps=1e-5, weight_decay=0.1)


def train_plain(name, model, dtype=torch.float64, epochs=1, after_step=None):
    """Train a copy of a model in one process without hpctrain; return losses, gradient norms and weights."""
    model = copy.deepcopy(model)
    optimizer = trained(model.parameters())
    losses, norms = [], []
    for _ in range(epochs):
        for batch in loader(name, dtype):
            total, count = sum_and_count(name, model, batch)
            loss = total / count
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if after_step is not None:
                after_step(model)
    return losses, norms, {key: value.detach().clone() for key, value in model.state_dict().items()}
