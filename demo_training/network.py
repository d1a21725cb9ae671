"""The demo's Llama in plain torch, with the names and the arithmetic of `transformers`' Llama."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from demo_training import shape
from holdfast.demo.files import NORM_EPSILON, ROTARY_BASE
from holdfast.demo.tokenizer import VOCABULARY_SIZE

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of the rotary angles."""


class Attention(nn.Module):  # type: ignore[misc] # torch is untyped here
    """Causal attention with rotary positions, two heads of queries for each head of keys."""

    def __init__(self) -> None:
        super().__init__()
        queries = shape.HEADS * shape.HEAD_SIZE
        keys = shape.KV_HEADS * shape.HEAD_SIZE
        self.q_proj = nn.Linear(shape.HIDDEN_SIZE, queries, bias=False)
        self.k_proj = nn.Linear(shape.HIDDEN_SIZE, keys, bias=False)
        self.v_proj = nn.Linear(shape.HIDDEN_SIZE, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.HIDDEN_SIZE, bias=False)

    def forward(self, hidden: torch.Tensor, turns: Turns) -> torch.Tensor:
        """The attention's output for `hidden`, a batch of sequences."""
        batch, length, _ = hidden.shape
        heads = (batch, length, -1, shape.HEAD_SIZE)
        query = _turned(self.q_proj(hidden).view(heads).transpose(1, 2), turns)
        key = _turned(self.k_proj(hidden).view(heads).transpose(1, 2), turns)
        value = self.v_proj(hidden).view(heads).transpose(1, 2)
        groups = shape.HEADS // shape.KV_HEADS
        output = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            is_causal=True,
        )
        return self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):  # type: ignore[misc] # torch is untyped here
    """The gated layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.HIDDEN_SIZE, shape.INTERMEDIATE_SIZE, bias=False)
        self.up_proj = nn.Linear(shape.HIDDEN_SIZE, shape.INTERMEDIATE_SIZE, bias=False)
        self.down_proj = nn.Linear(shape.INTERMEDIATE_SIZE, shape.HIDDEN_SIZE, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for `hidden`."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):  # type: ignore[misc] # torch is untyped here
    """Attention and feed-forward, each beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = FeedForward()
        self.input_layernorm = nn.RMSNorm(shape.HIDDEN_SIZE, eps=NORM_EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(shape.HIDDEN_SIZE, eps=NORM_EPSILON)

    def forward(self, hidden: torch.Tensor, turns: Turns) -> torch.Tensor:
        """The residual stream after this layer."""
        return self.fed(self.attended(hidden, turns))

    def attended(self, hidden: torch.Tensor, turns: Turns) -> torch.Tensor:
        """The residual stream after the attention."""
        return hidden + self.self_attn(self.input_layernorm(hidden), turns)

    def fed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream after the feed-forward, which looks at each place alone."""
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Body(nn.Module):  # type: ignore[misc] # torch is untyped here
    """Everything before the output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY_SIZE, shape.HIDDEN_SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(shape.LAYERS))
        self.norm = nn.RMSNorm(shape.HIDDEN_SIZE, eps=NORM_EPSILON)


class Network(nn.Module):  # type: ignore[misc] # torch is untyped here
    """Logits of the next token; `state_dict` is a checkpoint of LlamaForCausalLM."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(shape.HIDDEN_SIZE, VOCABULARY_SIZE, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 if is_output else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=deviation)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits for sequences at `positions`, at all places or at the `wanted` ones alone."""
        turns = _turns(positions)
        hidden = self.model.embed_tokens(tokens)
        *earlier, last = self.model.layers
        for layer in earlier:
            hidden = layer(hidden, turns)
        hidden = last.attended(hidden, turns)
        if wanted is not None:
            hidden = hidden[wanted]
        return self.lm_head(self.model.norm(last.fed(hidden)))


def _turns(positions: torch.Tensor) -> Turns:
    """For each pair of channels at each position; both are batch, 1, length, head size / 2."""
    half = torch.arange(0, shape.HEAD_SIZE, 2, dtype=torch.float32)
    frequencies = ROTARY_BASE ** (-half / shape.HEAD_SIZE)
    angles = (positions.float()[..., None] * frequencies)[:, None]
    return angles.cos(), angles.sin()


def _turned(heads: torch.Tensor, turns: Turns) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = turns
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
