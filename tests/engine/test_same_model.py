"""What is the same model: each row of the table in docs/reliability.md, measured."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, quants

from hiradix.adapters.vllm import names
from hiradix.apps.engine import canary
from hiradix.memory import KVShape
from hiradix.memory.compare import BEHIND_OTHERS, PageComparer
from hiradix.prefix_cache import ModelIdentity, model_identity, origin_of, page_fingerprint, run_with
from hiradix.storage import PageFingerprint
from hiradix.tree.hashing import PageRows, hash_pages, namespace_seed
from tests.engine.checkpoints import write_tokenizer
from tests.engine.deployments import LAYERS, TOKENS, Change, Deployment, Patch, Seen, see

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
HEADING = "## What is the same model"
NOT_ASKED = "not asked"


# -- changes to weights ------------------------------------------------------------------


def matrices(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, values in model.named_parameters():
        if values.dim() == 2 and "embed" not in name:
            yield name, values


def each_matrix(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(model: Any) -> None:
        for _, values in matrices(model):
            values.copy_(change(values))

    return changed


def per_row(bits: int) -> Change:
    def rounded(values: torch.Tensor) -> torch.Tensor:
        step = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (values / step).round() * step

    return each_matrix(rounded)


def in_groups(values: torch.Tensor) -> torch.Tensor:
    """4 bits, a scale and a zero for 64 numbers, as GPTQ and AWQ have them."""
    groups = values.reshape(-1, 64)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 15
    return (((groups - low) / step).round() * step + low).view_as(values)


def as_fp8(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(1, keepdim=True) / 448
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def as_gguf(kind: str) -> Change:
    of = getattr(GGMLQuantizationType, kind)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(quants.dequantize(quants.quantize(values.numpy(), of), of))

    return each_matrix(rounded)


def as_bfloat16(model: Any) -> None:
    for values in model.parameters():
        values.copy_(values.bfloat16())


def with_lora(size: float, seed: int = 1, layers: Sequence[int] = range(LAYERS)) -> Change:
    """Updates of rank 4 to queries and values, of that size relative to the weights."""

    def changed(model: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, values in matrices(model):
            if ("q_proj" in name or "v_proj" in name) and int(name.split(".")[2]) in layers:
                left, right = (torch.randn(n, 4, generator=generator) for n in values.shape)
                update = left @ right.T
                values += size * values.norm() / update.norm() * update

    return changed


def trained(share: float) -> Change:
    def changed(model: Any) -> None:
        generator = torch.Generator().manual_seed(2)
        for values in model.parameters():
            values += share * values.std(correction=0) * torch.randn(values.shape, generator=generator)

    return changed


def one_row(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.weight[96] *= -1


def one_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias[3] += 3.0


def embedding_nobody_asks(model: Any) -> None:
    """Of a token that no canary has."""
    model.model.embed_tokens.weight[UNASKED] *= -1


def stored_buffer(model: Any) -> None:
    model.model.layers[1].mlp.gate.e_score_correction_bias += torch.tensor([2.0, 0.0, 0.0, -2.0])


def one_expert(model: Any) -> None:
    model.model.layers[1].mlp.experts.down_proj[2] *= -1


def last_mlp(model: Any) -> None:
    model.model.layers[-1].mlp.down_proj.weight *= -1


def output_layer(model: Any) -> None:
    untied(model)
    model.lm_head.weight *= -1


def other_heads(model: Any) -> None:
    """The three KV heads, and the nine that ask them, change places: every answer is as before."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for module in (attention.q_proj, attention.k_proj, attention.v_proj):
            module.weight.copy_(torch.cat(module.weight.chunk(3)[::-1]))
        attention.o_proj.weight.copy_(torch.cat(attention.o_proj.weight.chunk(3, 1)[::-1], 1))


def other_vocabulary(model: Any) -> None:
    weights = model.model.embed_tokens.weight  # the output layer's, too
    weights.copy_(weights.flip(0))


def resized(model: Any) -> None:
    model.resize_token_embeddings(TOKENS + 64, mean_resizing=False)


def untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.clone())
    model.config.tie_word_embeddings = False


UNASKED = min(set(range(TOKENS)) - set(canary._tokens(256, TOKENS)))


# -- changes to the code that runs them ----------------------------------------------------


def attention_by_hand(cap: float | None = None, scaled: float = 1.0) -> Patch:
    """Softmax spelled out, as kernels of another make have it: eager, or with a logit softcap."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float,
        attn_mask: torch.Tensor | None = None, is_causal: bool = False, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        logits = query @ key.transpose(-1, -2) * scale * scaled
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        if is_causal:
            ahead = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(ahead, float("-inf"))
        logits = logits if attn_mask is None else logits + attn_mask
        return torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype) @ value

    return lambda patch: patch.setattr("hiradix.apps.engine.attention.scaled_dot_product_attention", attend)


def without_onednn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.mkldnn, "enabled", False)


def as_tf32(values: torch.Tensor) -> torch.Tensor:
    return ((values.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def with_tf32(patch: pytest.MonkeyPatch) -> None:
    """Products of 32 bit numbers as tensor cores compute them where `allow_tf32` is on."""
    real = torch.nn.functional.linear
    patch.setattr(
        torch.nn.functional, "linear", lambda x, weight, bias=None: real(as_tf32(x), as_tf32(weight), bias)
    )


def with_other_code(patch: pytest.MonkeyPatch) -> None:
    """The same config, and a modelling file that does something else with it."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))
        return out

    patch.setattr(LlamaMLP, "forward", forward)


def of_another_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hiradix.__version__", "99")


def other_defaults(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.3}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


# -- what is measured ------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A way in which two deployments differ. kv: whether what both compute for equal tokens is the same.

    name: what the second calls the model.
    """

    kv: str
    other: Deployment
    base: Deployment = Deployment()
    name: str = "model"


@dataclass(frozen=True)
class Measured:
    """A way that no tiny server has: what tells it is asked directly, name and canary."""

    kv: str
    ask: Callable[[Bases], tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """How two deployments are told apart."""

    kv: str
    name: str
    canary: str

    @property
    def is_shared(self) -> bool:
        return (self.name, self.canary) == ("same", "same")

    def cells(self) -> list[str]:
        return [self.kv, self.name, self.canary, "yes" if self.is_shared else "no"]


def said(is_same: bool) -> str:
    return "same" if is_same else "other"


BF16_SHAPE, FP8_SHAPE = (KVShape(4, 2, 16, 16, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn))


def pages(shape: KVShape = BF16_SHAPE, **model: int) -> PageFingerprint:
    return page_fingerprint(ModelIdentity("model", **model), shape, 16, "page_first")


def forms(one: PageFingerprint, other: PageFingerprint) -> Callable[[Bases], tuple[str, str]]:
    """Pages of two forms: those of equal form only are ever compared."""
    is_same = one.digest() == other.digest()
    return lambda _: (said(is_same), "same" if is_same else NOT_ASKED)


def keys(**differs: Any) -> Callable[[Bases], tuple[str, str]]:
    """Names of pages of equal tokens, whose key differs in so much: other names are never compared."""

    def name(extra_key: str | None = None, cache_salt: str | None = None, extra: bytes | None = None) -> Any:
        rows = np.arange(8).reshape(1, 8)
        return hash_pages(PageRows(namespace_seed(extra_key, cache_salt), rows, (extra,)))

    is_same = name() == name(**differs)
    return lambda _: (said(is_same), "same" if is_same else NOT_ASKED)


def stages(_: Bases) -> tuple[str, str]:
    """The second of two pipeline stages: layers 1 and 2, and layers 0 and 1, of the same model."""
    one, other = (pages(model_shape(2), pp_rank=1, pp_size=2) for _ in range(2))
    kv = random_kv()
    compare = PageComparer(model_shape(2), "page_first_direct", 8, (BEHIND_OTHERS + 1, BEHIND_OTHERS + 2))
    is_same = compare([kv[:, 1:3].tobytes()], [kv[:, 0:2].tobytes()]).is_same
    return said(one.digest() == other.digest()), said(is_same)


def scaled_fp8(_: Bases) -> tuple[str, str]:
    """KV as float8 with and without a scale; which is said by an option or by the weights' files."""
    named = [run_with(ModelIdentity("model"), {"quantization_param_path": scale}) for scale in (None, "one")]
    shape = replace(model_shape(3), dtype=torch.float8_e4m3fn)
    codes = [
        (torch.from_numpy(random_kv()) * scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
        for scale in (1.0, 2.5)
    ]
    is_same = PageComparer(shape, "page_first_direct", 8)([codes[0]], [codes[1]]).is_same
    return said(named[0] == named[1]), said(is_same)


def adapters(bases: Bases) -> tuple[str, str]:
    """The pages of an adapter go by its id, whatever it weighs."""
    name, _ = keys()(bases)
    row = Row("other", Deployment(change=with_lora(0.1, seed=2)), Deployment(change=with_lora(0.1)))
    return name, judge(row, bases, bases.scratch()).canary


def out_of_a_repository(bases: Bases) -> tuple[str, str]:
    """Two GGUF files of one hub repository, as vLLM is told of them: `org/model:Q4_0`."""
    cache = bases.scratch()
    folder = cache / "models--org--model" / "snapshots" / "c1"
    folder.mkdir(parents=True)
    (cache / "models--org--model" / "refs").mkdir()
    (cache / "models--org--model" / "refs" / "main").write_text("c1")
    for kind in ("Q4_0", "Q5_0"):
        (folder / f"model-{kind}.gguf").write_text(kind)
    first, second = (origin_of(f"org/model:{kind}", cache_dir=str(cache)) for kind in ("Q4_0", "Q5_0"))
    row = WEIGHTS["two quantisations of one file, GGUF Q4_0 and Q5_0"]
    return said(first == second), judge(row, bases, bases.scratch()).canary


def modelscope_name(bases: Bases) -> tuple[str, str]:
    """A name of ModelScope, whose client has other weights for it by now."""
    place, found = bases.scratch(), []
    client = ModuleType("modelscope.hub.snapshot_download")
    client.snapshot_download = lambda *_, **__: str(place)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_MODELSCOPE", "1")
        for name in ("modelscope", "modelscope.hub"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, client.__name__, client)
        for weights in ("one", "two"):
            (place / "model.safetensors").write_text(weights)
            names._of_modelscope.cache_clear()
            found.append(origin_of(names.local_place("org/model"), is_hub=names.names_are_hub()))
        names._of_modelscope.cache_clear()
    row = NAMES["a folder, or a hub name's commit, whose weights moved"]
    return said(found[0] == found[1]), judge(row, bases, bases.scratch()).canary


def by_transformers(bases: Bases) -> tuple[str, str]:
    """The canary's first page by transformers' own forward."""
    own, _ = bases.get(Deployment(cache={"hicache_mem_layout": "page_first_direct"}))
    path, size = bases.plain("smollm2"), own.pages[0].page_size
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.inference_mode():
        layers = model(torch.tensor([canary._tokens(size, TOKENS)]), use_cache=True).past_key_values.layers
    arrays = [
        torch.stack([getattr(layer, kind)[0].transpose(0, 1) for layer in layers])
        for kind in ("keys", "values")
    ]
    data = b"".join(array.contiguous().view(torch.uint8).numpy().tobytes() for array in arrays)
    shape = KVShape(LAYERS, 3, 64, 64, torch.bfloat16)
    assert own.canary is not None
    is_same = PageComparer(shape, "page_first_direct", size)([data], [own.canary]).is_same
    return said(model_identity(str(path), "model") == own.identity), said(is_same)


def model_shape(layers: int) -> KVShape:
    return KVShape(layers, 2, 16, 16, torch.float32)


def random_kv() -> Any:
    """A page of K and V of three layers, page_first_direct, float32."""
    return torch.randn(2, 3, 8, 2, 16, generator=torch.Generator().manual_seed(4)).numpy()


def run(**fields: Any) -> Deployment:
    return Deployment(engine=fields)


def config(family: str = "smollm2", **fields: Any) -> Deployment:
    return Deployment(family, config=fields)


FP32 = run(dtype="float32")
LLAMA, DEEPSEEK, WINDOW = (Deployment(name) for name in ("llama", "deepseek", "mistral-window"))
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 32, "long_factor": [4.0] * 32,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100000.0}
SHARE = {"rope_type": "proportional", "rope_theta": 10000.0}

WEIGHTS: dict[str, Row | Measured] = {
    "weights of another seed": Row("other", Deployment("llama", {"seed": 8}), LLAMA),
    "one row of one matrix": Row("other", Deployment(change=one_row)),
    "one number of one bias": Row("other", Deployment("qwen2", change=one_bias), Deployment("qwen2")),
    "one embedding, of a token that no canary has": Row("other", Deployment(change=embedding_nobody_asks)),
    "a buffer that is stored with the weights": Row(
        "other", Deployment("deepseek", change=stored_buffer), DEEPSEEK
    ),
    "one expert of a mixture": Row("other", Deployment("deepseek", change=one_expert), DEEPSEEK),
    "weights as int8, a scale per row": Row("other", Deployment(change=per_row(8))),
    "weights as GPTQ or AWQ, 4 bits in groups": Row("other", Deployment(change=each_matrix(in_groups))),
    "weights as fp8": Row("other", Deployment(change=each_matrix(as_fp8))),
    "weights as GGUF Q8_0": Row("other", Deployment(change=as_gguf("Q8_0"))),
    "two quantisations of one file, GGUF Q4_0 and Q5_0": Row(
        "other", Deployment(change=as_gguf("Q5_0")), Deployment(change=as_gguf("Q4_0"))
    ),
    "a LoRA merged in, 3 % of the weights": Row("other", Deployment(change=with_lora(0.03))),
    "a LoRA of the last layer alone, 3 %": Row(
        "other", Deployment(change=with_lora(0.03, layers=(LAYERS - 1,)))
    ),
    "an adapter trained on in place, under one id": Measured("other", adapters),
    "fine-tuned by 1 %": Row("other", Deployment(change=trained(0.01))),
    "fine-tuned by 0.1 %, served as bfloat16": Row("other", Deployment(change=trained(0.001))),
    "fine-tuned by 0.1 %, served as float32": Row(
        "other", Deployment(change=trained(0.001), engine=FP32.engine), FP32
    ),
    "the MLP of the last layer, which decides no KV": Row("same", Deployment(change=last_mlp)),
    "the output layer": Row("same", Deployment(change=output_layer), Deployment(change=untied)),
    "tied weights untied, with the same numbers": Row("same", Deployment(change=untied)),
    "embeddings resized for more tokens": Row("same", Deployment(change=resized)),
    "the same weights in more files": Row("same", Deployment(save={"max_shard_size": "40MB"})),
    "the same weights rounded on disk to the type served": Row("same", Deployment(change=as_bfloat16)),
}

ARITHMETIC: dict[str, Row | Measured] = {
    "dtype float16 for bfloat16": Row("other", run(dtype="float16")),
    "dtype float32 for bfloat16": Row("other", FP32),
    "eager attention for a fused kernel, bfloat16": Row("same", Deployment(patch=attention_by_hand())),
    "eager attention for a fused kernel, float32": Row(
        "same", Deployment(engine=FP32.engine, patch=attention_by_hand()), FP32
    ),
    "kernels of another library": Row("same", Deployment(patch=without_onednn)),
    "threads, chunks, batch sizes": Row(
        "same", run(num_threads=2, chunked_prefill_size=16, max_running_requests=3)
    ),
    "TF32 products in a float32 model": Row("other", Deployment(engine=FP32.engine, patch=with_tf32), FP32),
    "KV kept as fp8": Measured("other", forms(pages(), pages(FP8_SHAPE))),
    "other scales of an fp8 KV": Measured("other", scaled_fp8),
    "another engine, on the same checkpoint": Measured("same", by_transformers),
    "storage that quantises pages": Row("other", Deployment(extra={"quantise": "fp8"})),
}

GEOMETRY: dict[str, Row | Measured] = {
    "page size": Row("same", Deployment(cache={"page_size": 4})),
    "order of axes in a page": Row("same", Deployment(cache={"hicache_mem_layout": "layer_first"})),
    "number of layers": Row("other", Deployment("llama", {"num_hidden_layers": 2}), LLAMA),
    "number of KV heads": Row("other", Deployment("llama", {"num_key_value_heads": 4}), LLAMA),
    "KV heads in another order, with those that ask them": Row("other", Deployment(change=other_heads)),
    "a pool of their own for layers with windows": Row(
        "same", Deployment("gemma3", engine={"swa_full_tokens_ratio": 1.0}), Deployment("gemma3")
    ),
    "context length, below 16,384": Row("same", run(context_length=1024)),
    "number of tensor parallel ranks": Measured("other", forms(pages(), pages(tp_rank=0, tp_size=2))),
    "rank of a tensor parallel group": Measured(
        "other", forms(pages(tp_rank=0, tp_size=2), pages(tp_rank=1, tp_size=2))
    ),
    "number of pipeline stages": Measured("other", forms(pages(), pages(pp_rank=0, pp_size=2))),
    "pipeline stages cut at other layers, as many in each": Measured("other", stages),
}

CONFIG: dict[str, Row | Measured] = {
    "rope base doubled": Row("other", config(rope_parameters={"rope_theta": 200000.0})),
    "rope base 1 % larger": Row("other", config(rope_parameters={"rope_theta": 101000.0})),
    "rope scaled by 2": Row("other", config(rope_parameters={"rope_type": "linear", "factor": 2.0})),
    "rope of far positions alone (llama3)": Row(
        "other",
        config(
            rope_parameters={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 4096,
            }
        ),
    ),
    "yarn for a plain rope": Row(
        "other",
        config(
            rope_parameters={
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
            }
        ),
    ),
    "long rope, a context beyond the original length and one within": Row(
        "other",
        Deployment(config={"rope_parameters": LONGROPE}, engine={"context_length": 512}),
        config(rope_parameters=LONGROPE),
    ),
    "factor of a dynamic rope, in the context it was made for": Row(
        "same",
        config(rope_parameters={**DYNAMIC, "factor": 8.0}),
        config(rope_parameters={**DYNAMIC, "factor": 2.0}),
    ),
    "share of a head that is rotated": Row(
        "other",
        config("qwen3", rope_parameters={**SHARE, "partial_rotary_factor": 0.5}),
        config("qwen3", rope_parameters={**SHARE, "partial_rotary_factor": 1.0}),
    ),
    "norm epsilon 1e-4 for 1e-5": Row("other", config(rms_norm_eps=1e-4)),
    "norm epsilon 1e-6 for 1e-5, bfloat16": Row("other", config(rms_norm_eps=1e-6)),
    "norm epsilon 1e-6 for 1e-5, float32": Row(
        "other", Deployment(config={"rms_norm_eps": 1e-6}, engine=FP32.engine), FP32
    ),
    "size of the sliding window": Row("other", config("mistral-window", sliding_window=32), WINDOW),
    "a sliding window or none": Row("other", config("mistral-window", sliding_window=None), WINDOW),
    "attention scale": Row("other", config("gemma3", query_pre_attn_scalar=64), Deployment("gemma3")),
    "logit softcap of 20": Row("other", Deployment(patch=attention_by_hand(cap=20.0))),
    "logit softcap of 5": Row("other", Deployment(patch=attention_by_hand(cap=5.0))),
    "modelling code, under the same config (trust_remote_code)": Row(
        "other", Deployment(patch=with_other_code)
    ),
    "a key of the config that decides nothing": Row("same", config(transformers_version="0")),
}

NAMES: dict[str, Row | Measured] = {
    "another tokenizer for the same weights": Row("same", Deployment(files=write_tokenizer)),
    "chat template, stop tokens, sampling defaults": Row("same", Deployment(files=other_defaults)),
    "the vocabulary in another order": Row("other", Deployment(change=other_vocabulary)),
    "served name": Row("same", Deployment(), name="another"),
    "path of the folder": Row("same", Deployment()),
    "a folder, or a hub name's commit, whose weights moved": Row("other", Deployment(change=trained(0.3))),
    "two quantisations out of one hub repository (`org/model:Q4_0`)": Measured("other", out_of_a_repository),
    "a name of ModelScope's whose weights moved": Measured("other", modelscope_name),
    "release of hiradix": Row("same", Deployment(patch=of_another_release)),
    "the operator's label (`--hicache-storage-identity`)": Row(
        "same", Deployment(cache={"hicache_storage_identity": "b"}),
        Deployment(cache={"hicache_storage_identity": "a"}),
    ),
    "policies, pool sizes, order of eviction": Row("same", Deployment(
        engine={"max_total_tokens": 512},
        cache={"hicache_write_policy": "write_back", "radix_eviction_policy": "lru"},
    )),
    "salt or tenant of a request": Measured("same", keys(cache_salt="tenant")),
    "adapter of a request (`extra_key`)": Measured("other", keys(extra_key="adapter")),
    "a picture behind the same placeholders": Measured("other", keys(extra=b"digest")),
}  # fmt: skip

ROWS = {**WEIGHTS, **ARITHMETIC, **GEOMETRY, **CONFIG, **NAMES}


class Bases:
    """What the first deployments of rows left in their stores, each made once; each family's checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[tuple[Deployment, Seen, Path]] = []
        self._plain: dict[str, Path] = {}

    def plain(self, family: str) -> Path:
        if family not in self._plain:
            Deployment(family).write(self._folder / family)
            self._plain[family] = self._folder / family
        return self._plain[family]

    def scratch(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    def get(self, wanted: Deployment) -> tuple[Seen, Path]:
        for base, seen, store in self._made:
            if base == wanted:
                return seen, store
        store = self._folder / f"store-{len(self._made)}"
        seen = self.see(wanted, self._folder / f"model-{len(self._made)}", store, "model")
        self._made.append((wanted, seen, store))
        return seen, store

    def see(self, deployment: Deployment, folder: Path, store: Path, name: str) -> Seen:
        deployment.write(folder, self.plain(deployment.family))
        try:
            return see(deployment, folder, store, name)
        finally:
            shutil.rmtree(folder)  # some 60 MB each


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    folder = tmp_path_factory.mktemp("bases")
    yield Bases(folder)
    shutil.rmtree(folder)


def judge(row: Row | Measured, bases: Bases, folder: Path) -> Verdict:
    if isinstance(row, Measured):
        return Verdict(row.kv, *row.ask(bases))
    base, store = bases.get(row.base)
    shutil.copytree(store, folder / "store")
    other = bases.see(row.other, folder / "model", folder / "store", row.name)
    is_same_name = (base.identity, base.pages, base.label) == (other.identity, other.pages, other.label)
    verdict = NOT_ASKED
    if other.figures["canary_generations_rejected"]:
        verdict = "other"
    elif other.figures["canary_adopted"]:
        verdict = "same"
    return Verdict(row.kv, said(is_same_name), verdict)


def table() -> dict[str, list[str]]:
    """The table of the docs: by row its cells but for the last, the remark."""
    text = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:5] for cells in rows[1:]}


def test_the_table_has_every_row_and_no_other() -> None:
    assert list(table()) == list(ROWS) and len(ROWS) >= 40


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table_is_what_is_measured(name: str, bases: Bases, tmp_path: Path) -> None:
    found = judge(ROWS[name], bases, tmp_path)
    assert table()[name] == found.cells()
    assert found.kv == "same" or not found.is_shared, "pages of another model would be served"
