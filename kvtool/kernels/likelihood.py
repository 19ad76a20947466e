"""Kernels over logits: likelihood and divergence."""

import numpy as np

from kvtool.kernels.kernel import kernel


@kernel("Tuple((i8, f8))(f4[::1])")
def _top_and_log_sum(logits):
    """Return the index of the highest logit, and log(sum(exp(logit - highest))).

    logits: f32[n_vocab]. Among equal logits the first is returned.
    """
    best = 0
    for j in range(1, len(logits)):
        if logits[j] > logits[best]:
            best = j
    top = logits[best]
    total = 0.0
    for x in logits:
        total += np.exp(np.float64(x - top))
    return best, np.log(total)


@kernel("void(f4[:,::1], i4[::1], f8[::1])")
def token_nll(logits, target, nll):
    """Negative log-likelihood in nats: logits f32[n, n_vocab], target i32[n] -> nll f64[n]."""
    for i in range(len(target)):
        best, log_sum = _top_and_log_sum(logits[i])
        nll[i] = log_sum - np.float64(logits[i, target[i]] - logits[i, best])


@kernel("void(f4[:,::1], i4[:,::1], i4[::1], f4[:,::1])")
def log_probs(logits, tokens, top, log_p):
    """Compute the log-probabilities of k tokens per prediction, in nats.

    logits: f32[n, n_vocab]. tokens: i32[n, k]. Writes log_p f32[n, k], and top i32[n]: the most likely token
    of each prediction; if several tokens are equally likely, the lowest id.
    """
    n, k = tokens.shape
    for i in range(n):
        best, log_sum = _top_and_log_sum(logits[i])
        top[i] = best
        for j in range(k):
            log_p[i, j] = np.float64(logits[i, tokens[i, j]] - logits[i, best]) - log_sum


@kernel("void(f4[:,::1], i4[::1], i4[:,::1], f4[:,::1], f8[::1], f8[::1], i4[::1])")
def divergence(logits, target, tokens, log_p, nll, kl, top):
    """Divergence of predictions Q from predictions P, of which only the k likeliest tokens are known.

    logits: f32[n, n_vocab] of Q. target: i32[n], the actual next tokens. tokens: i32[n, k], the likeliest
    tokens of P. log_p: f32[n, k], the log-probabilities of these tokens.

    Writes nll f64[n] of Q (see `token_nll`), kl f64[n], and top i32[n], the likeliest tokens of Q. kl is KL(P
    || Q) in nats, where all tokens that are not in `tokens` are merged into one token.
    """
    n, k = tokens.shape
    for i in range(n):
        best, log_sum = _top_and_log_sum(logits[i])
        nll[i] = log_sum - np.float64(logits[i, target[i]] - logits[i, best])
        top[i] = best
        total, rest_p, rest_q = 0.0, 1.0, 1.0
        for j in range(k):
            # round to float32, because log_p is float32: equal predictions then have zero divergence
            log_q = np.float32(np.float64(logits[i, tokens[i, j]] - logits[i, best]) - log_sum)
            p = np.exp(np.float64(log_p[i, j]))
            total += p * (np.float64(log_p[i, j]) - np.float64(log_q))
            rest_p -= p
            rest_q -= np.exp(np.float64(log_q))
        # rounding may make the probability of all other tokens 0 or negative
        rest_p, rest_q = max(rest_p, 1e-12), max(rest_q, 1e-12)
        kl[i] = total + rest_p * np.log(rest_p / rest_q)
