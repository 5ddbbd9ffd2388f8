"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347): an environment rolled out
by scan with drawn actions, advantages by a scan from the end, the clipped objective."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import weight, zeros

RATE, CLIP, GAMMA, LAMBDA = 0.1, 0.2, 0.95, 0.9


def parameters(rng, d=4, h=16, actions=3):
    return {"w": weight(rng, d, h), "b": zeros(h), "policy": weight(rng, h, actions),
            "value": weight(rng, h, 1)}


def policy(p, s):
    h = ts.tanh(s @ p["w"] + p["b"])
    return ts.log_softmax(h @ p["policy"]), (h @ p["value"])[..., 0]


def environment(s, action, push):
    """The next state and the reward, which is large near the origin."""
    s = 0.9 * s + ts.take(push, action)
    return s, -ts.mean(ts.square(s), axis=-1)


def batch(rng, T=8, B=4, d=4, actions=3):
    """The parameters that act, states to begin with, what actions do, keys of the draws."""
    return (parameters(rng, d=d, actions=actions), weight(rng, B, d, fan=1),
            weight(rng, actions, d, fan=9), rng.integers(0, 99, (T, 2)).astype(np.uint32))


def advantages(values, rewards, last):
    """A_t = delta_t + gamma lambda A_{t+1}   Schulman et al. 2015, arXiv:1506.02438, eq. 16."""
    def back(carry, now):
        after, total = carry
        value, reward = now
        total = reward + GAMMA * after - value + GAMMA * LAMBDA * total
        return (value, total), total

    return ts.scan(back, (last, ts.zeros_like(last)), (values, rewards), reverse=True)[1]


def experience(p, s, push, keys):
    """Of each step: states [T, B, d], actions, log probabilities, advantages, goals [T, B]."""
    def step(s, key):
        logp, value = policy(p, s)
        action = ts.random.categorical(logp, key=key)
        chosen = ts.take_along_axis(logp, action[:, None], axis=-1)[:, 0]
        after, reward = environment(s, action, push)
        return after, (s, action, chosen, value, reward)

    end, (states, actions, old, values, rewards) = ts.scan(step, s, keys)
    adv = advantages(values, rewards, policy(p, end)[1])
    return states, actions, old, (adv - ts.mean(adv)) / (ts.std(adv) + 1e-6), adv + values


def loss(p, acting, start, push, keys):
    states, actions, old, adv, goal = experience(acting, start, push, keys)
    logp, values = policy(p, states)                                 # [T, B, A], [T, B]
    now = ts.take_along_axis(logp, actions[..., None], axis=-1)[..., 0]
    ratio = ts.exp(now - old)
    gain = ts.minimum(ratio * adv, ts.clip(ratio, 1 - CLIP, 1 + CLIP) * adv)
    entropy = -ts.mean(ts.sum(ts.exp(logp) * logp, axis=-1))
    return -ts.mean(gain) + 0.5 * ts.mean(ts.square(values - goal)) - 0.01 * entropy


def torch_loss(torch, p, acting, start, push, keys):
    """On what ts drew; advantages are computed anew."""
    def policy(p, s):
        h = torch.tanh(s @ p["w"] + p["b"])
        return torch.log_softmax(h @ p["policy"], -1), (h @ p["value"])[..., 0]

    given = ({k: ts.tensor(v.cpu().numpy()) for k, v in acting.items()},
             *(ts.tensor(v.cpu().numpy()) for v in (start, push, keys)))
    actions = torch.tensor(experience(*given)[1].numpy(), device=start.device)
    s, states, rewards = start, [], []
    for a in actions:
        states.append(s)
        s = 0.9 * s + push[a]
        rewards.append(-(s**2).mean(-1))
    states = torch.stack(states)
    olds, values = policy(acting, states)
    after, total, adv = policy(acting, s)[1], 0.0, []
    for value, reward in zip(values.flip(0), reversed(rewards), strict=True):
        total = reward + GAMMA * after - value + GAMMA * LAMBDA * total
        after = value
        adv.insert(0, total)
    adv = torch.stack(adv)
    goal, adv = adv + values, (adv - adv.mean()) / (adv.std(correction=0) + 1e-6)
    logp, values = policy(p, states)
    ratio = torch.exp(torch.take_along_dim(logp - olds, actions[..., None], -1)[..., 0])
    gain = torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv)
    entropy = -(logp.exp() * logp).sum(-1).mean()
    return -gain.mean() + 0.5 * ((values - goal) ** 2).mean() - 0.01 * entropy
