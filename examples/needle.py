"""Read a haystack several times into fast weights and look for its needles after each reading. Nothing is trained.

FACTS pairs "key value" stand among FILLER tokens. Every token asks with the vector of its kind; the memory learns to
answer each with the token after it, which is the value where a key stands. One reading is one chunk, hence one write.
`sdm-lite needle` trains a model that finds its own queries, values and gates.
"""

import numpy as np

from sdm_lite import FwPKMState, fwpkm

FACTS, FILLER, KINDS, WIDTH, SUB_KEYS = 48, 160, 320, 32, 16  # KINDS: keys, values and filler, each with a vector


def haystack(rng):
    """Return token kinds [T], and the facts' keys and values [FACTS]; kinds up to FACTS are keys."""
    keys, values = rng.permutation(FACTS), rng.integers(FACTS, 2 * FACTS, FACTS)
    filler = [[kind] for kind in rng.integers(2 * FACTS, KINDS, FILLER)]
    pieces = [[key, value] for key, value in zip(keys, values)] + filler
    order = rng.permutation(len(pieces))
    return np.concatenate([pieces[i] for i in order]), keys, values


def share_found(retrieved, wanted, vectors):
    """Return how often the value whose vector is nearest to what was retrieved is the right one."""
    values = vectors[FACTS : 2 * FACTS]
    distance = np.square(retrieved[:, None] - values).sum(-1)
    return np.mean(distance.argmin(1) + FACTS == wanted)


def main():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((KINDS, WIDTH)).astype(np.float32)
    sub_keys = rng.standard_normal((1, 2, SUB_KEYS, WIDTH // 2)).astype(np.float32)
    tokens, keys, values = haystack(rng)
    empty = FwPKMState(sub_keys, np.zeros((SUB_KEYS**2, WIDTH), np.float32))
    print(f"{FACTS} facts in {len(tokens)} tokens, {SUB_KEYS**2} slots; share of the facts found")
    for gated in (True, False):
        gates = np.where((tokens < FACTS) | (not gated), 1.0, 0.05).astype(np.float32)
        state, shares = empty, []
        for _ in range(4):
            seen = vectors[tokens][None]
            _, state = fwpkm(seen[:, :, None], seen, gates[None], state, chunk=len(tokens))
            asked = vectors[keys][None]
            found, _ = fwpkm(asked[:, :, None], asked, np.ones((1, FACTS), np.float32), state, update=False)
            shares.append(share_found(found[0], values, vectors))
        name = "gates open for keys" if gated else "gates open for all"
        print(f"{name:<20} " + "  ".join(f"{n} readings {share:.2f}" for n, share in enumerate(shares, 1)))


if __name__ == "__main__":
    main()
