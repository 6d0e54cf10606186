"""One training run: model, optimiser, carried states, and their files."""

import dataclasses
import hashlib
import json
import math
import os
import shutil

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tasks import mixture
from train import data, model as model_module, sparsity

POOL_SLOTS = 16
_POOL_ROWS = 2  # rows of a batch whose final states enter the pool
FILES = ("weights", "first_moment", "second_moment", "carried")


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Optimiser and loss. The rate rises for `warmup` steps, then falls on a cosine to 1/20.

    retentions: not empty, every other row runs sparsely (sparsity.py), a step at one of these.
    write_cost: nats for a mean beta of 1, so that writes nobody reads are not made.
    """

    rate: float = 2e-3
    warmup: int = 150
    betas: tuple = (0.9, 0.98)
    weight_decay: float = 0.05
    clip: float = 1.0
    answer_weight: float = 1.0
    retentions: tuple = ()
    write_cost: float = 0.0


def learning_rate(hyper, step, steps):
    if step < hyper.warmup:
        return hyper.rate * (step + 1) / hyper.warmup
    done = (step - hyper.warmup) / max(1, steps - hyper.warmup)
    return hyper.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Trainer:
    """Trains model `config` along `plan`; every quantity that the next step needs is in save()."""

    def __init__(self, config, plan, seed, device, hyper=Hyper(), use_bf16=None, start=None):
        """start: the checkpoint.start_of a folder to start from, or None for random weights."""
        self.plan, self.hyper, self.seed = plan, hyper, seed
        self.device = torch.device(device)
        self.use_bf16 = self.device.type == "cuda" if use_bf16 is None else use_bf16
        self.model = model_module.Model(config).initialise(seed)
        if start:
            self.model.load_state_dict(start.weights)
        self.model.to(self.device)
        decayed = [p for p in self.model.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": hyper.weight_decay},
             {"params": others, "weight_decay": 0.0}],
            lr=hyper.rate, betas=hyper.betas, eps=1e-9, fused=self.device.type == "cuda")
        linear = sum(kind == model_module.LINEAR for kind in config.layer_types)
        self.pool = torch.zeros(POOL_SLOTS, linear, config.linear_num_value_heads,
                                config.linear_key_head_dim, config.linear_value_head_dim,
                                dtype=torch.bfloat16, device=self.device)
        self.stream = self.pool.new_zeros(plan.stream_rows, *self.pool.shape[1:])
        self.step = self.tokens = 0
        self.seconds = 0.0
        self._identity = hashlib.sha256(
            repr((config, plan, seed, hyper, mixture.SHARES, start and start.digest)).encode()
        ).hexdigest()

    def _put(self, array, dtype):
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(dtype)

    def loss(self, batch):
        """(loss, dict of device tensors for the log, final states)."""
        tokens, answers = self._put(batch.tokens, torch.long), self._put(batch.answers, torch.bool)
        positions = initial = sparse = None
        if self.hyper.retentions:
            sparse = sparsity.of_batch(batch, self.seed, self.hyper.retentions, self.device)
        if batch.positions is not None:
            positions = self._put(batch.positions, torch.long)
        if batch.carried is not None:
            slots = self._put(batch.carried, torch.long)
            source = self.pool[slots.clamp_min(0)]
            if batch.streams:
                source = self.stream[:len(slots)]
            initial = source.float() * (slots != -1)[:, None, None, None, None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.use_bf16):
            hidden, states = self.model.hidden(tokens, positions, initial, sparse)
            logits = self.model.logits(hidden)[:, :-1]
        targets, answers = tokens[:, 1:], answers[:, 1:]
        each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(),
                                        reduction="none").view_as(targets)
        prose = (each * ~answers).sum() / (~answers).sum()
        # An example weighs as the root of its answers' tokens: many questions, not too loud.
        count = answers.sum(1)
        weight = answers / count.clamp_min(1).sqrt()[:, None]
        answer = (each * weight).sum() / weight.sum().clamp_min(1)
        with torch.no_grad():
            right = ((logits.argmax(-1) == targets) & answers).sum(1)
        log = {"prose": prose.detach(), "answer": answer.detach(), "right": right, "count": count}
        loss = prose + self.hyper.answer_weight * answer
        if sparse:
            loss = loss + self.hyper.write_cost * torch.stack(sparse.written).mean()
        return loss, log, states

    def train_step(self, batch):
        """Advances by one step and gives its log, unsynchronised with the device."""
        if batch.step != self.step:
            raise ValueError(f"batch: of step {batch.step}, must be of step {self.step}")
        rate = learning_rate(self.hyper, self.step, self.plan.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, log, states = self.loss(batch)
        loss.backward()
        log["norm"] = self._clip()
        self.optimizer.step()
        for i in range(min(_POOL_ROWS, len(states))):
            self.pool[(_POOL_ROWS * self.step + i) % POOL_SLOTS] = states[i].detach().bfloat16()
        if batch.streams:
            self.stream[:len(states)] = states.detach().bfloat16()
        self.step += 1
        self.tokens += batch.tokens.size
        return log

    def _clip(self):
        """The norm before clipping; a gradient that is not finite counts as zero."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        finite = torch.isfinite(norm)
        factor = torch.where(finite, (self.hyper.clip / (norm + 1e-6)).clamp_max(1.0), 0.0)
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_mul_(gradients, factor)
        return norm

    def _moment(self, key):
        return {name: self.optimizer.state[parameter][key]
                for name, parameter in self.model.named_parameters()}

    def save(self, folder):
        """Writes the state to `folder`, whole or not at all: four files below 16 MiB each."""
        meta = {"identity": self._identity, "step": str(self.step), "tokens": str(self.tokens),
                "seconds": repr(self.seconds), "torch": torch.__version__}
        parts = {"weights": self.model.state_dict(),
                 "carried": {"pool": self.pool, "stream": self.stream},
                 "first_moment": self._moment("exp_avg"),
                 "second_moment": self._moment("exp_avg_sq")}
        fresh, old = folder + ".new", folder + ".old"
        for path in (fresh, old):
            shutil.rmtree(path, ignore_errors=True)
        os.makedirs(fresh)
        for name in FILES:
            tensors = {key: value.detach().cpu().contiguous() for key, value in parts[name].items()}
            save_file(tensors, os.path.join(fresh, name + ".safetensors"), metadata=meta)
        if os.path.isdir(folder):
            os.rename(folder, old)
        os.rename(fresh, folder)
        shutil.rmtree(old, ignore_errors=True)

    def load(self, folder):
        """Goes on from save(). ValueError for the state of another model, plan, seed or rate."""
        for name in FILES:
            path = os.path.join(folder, name + ".safetensors")
            with safe_open(path, "pt") as file:
                meta = file.metadata()
            if meta["identity"] != self._identity:
                raise ValueError(f"{path}: identity {meta['identity'][:12]}, must be "
                                 f"{self._identity[:12]}: another model, plan, seed, rate or start")
            if name != "weights" and int(meta["step"]) != self.step:
                raise ValueError(f"{path}: of step {meta['step']}, must be of step {self.step}")
            tensors = load_file(path, device=str(self.device))
            if name == "weights":
                self.model.load_state_dict(tensors)
                self.step, self.tokens = int(meta["step"]), int(meta["tokens"])
                self.seconds = float(meta["seconds"])
            elif name == "carried":
                self.pool.copy_(tensors["pool"])
                self.stream.copy_(tensors["stream"])
            else:
                key = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}[name]
                for parameter_name, parameter in self.model.named_parameters():
                    self.optimizer.state[parameter][key] = tensors[parameter_name]
                    self.optimizer.state[parameter]["step"] = torch.tensor(
                        float(self.step), device=self.device if self._fused() else "cpu")

    def _fused(self):
        return bool(self.optimizer.defaults["fused"])


def summarise(batches, logs):
    """One line of the log from the steps since the last: losses, and accuracy of answer tokens."""
    lengths = [batch.tokens.shape[1] for batch in batches]
    norms = [log["norm"].item() for log in logs]
    line = {"step": batches[-1].step + 1,
            "skipped": sum(not math.isfinite(norm) for norm in norms),
            "prose": float(np.mean([log["prose"].item() for log in logs])),
            "answer": float(np.mean([log["answer"].item() for log in logs])),
            "norm": max(norms),
            "length": max(set(lengths), key=lengths.count)}
    families = np.concatenate([batch.families for batch in batches])
    right = np.concatenate([log["right"].cpu().numpy() for log in logs])
    count = np.concatenate([log["count"].cpu().numpy() for log in logs])
    line["accuracy"] = {
        name: round(float(right[families == i].sum() / count[families == i].sum()), 4)
        for i, name in enumerate(mixture.NAMES) if count[families == i].any()}
    return line


def write_line(path, line):
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_log(path, step):
    """Lines of the log up to `step`; a run that resumes drops what lies beyond."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [line for line in map(json.loads, file) if line["step"] <= step]
