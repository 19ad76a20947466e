#include "synthetic-cells.h"

#include "convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvtool {

// Cholesky factorization: replace a [n][n], which is positive definite, by its lower factor
static void factor(std::vector<double> & a, int n) {
    for (int r = 0; r < n; ++r) {
        for (int c = 0; c <= r; ++c) {
            double sum = a[r*n + c];
            for (int e = 0; e < c; ++e) {
                sum -= a[r*n + e]*a[c*n + e];
            }
            a[r*n + c] = c < r ? sum/a[c*n + c] : std::sqrt(std::max(sum, 1e-300));
        }
    }
}

// Solve a x = b. root: the Cholesky factor of a. The solution x is written to b
static void solve(const std::vector<double> & root, double * b, int n) {
    for (int r = 0; r < n; ++r) {
        for (int e = 0; e < r; ++e) {
            b[r] -= root[r*n + e]*b[e];
        }
        b[r] /= root[r*n + r];
    }
    for (int r = n - 1; r >= 0; --r) {
        for (int e = r + 1; e < n; ++e) {
            b[r] -= root[e*n + r]*b[e];
        }
        b[r] /= root[r*n + r];
    }
}

// Ridge regularization of the queries' Gram matrix: this share of the mean of its diagonal is added to each diagonal
// element. Without the ridge, keys would become very long if the queries of a row are nearly equal. The ridge changes
// the logits slightly; this error is corrected afterwards.
static constexpr double ridge = 1e-4;

// number of corrections of the ridge's error; each correction reduces it by about the factor `ridge`
static constexpr int n_correction = 3;

// Parameters of synthetic_cells::refine, which improves quantized keys. n_refine: number of passes over all elements of
// a key. other_head_weight: weight of squared errors in products with the queries of other heads. The weight is 1 for
// the head of the cell
static constexpr int    n_refine          = 3;
static constexpr double other_head_weight = 0.25;

// Share of a head's softmax sum that goes to the cell of each other head. The rest goes to the head's cell. A
// smaller share would need longer keys, and the logits of longer keys have larger rounding errors
static double off_diagonal_share(int n_head) {
    return 0.25/n_head;
}

synthetic_cells::synthetic_cells(int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, const logit_params & logits)
    : keys(n_head*n_embd_k), values(n_head*n_embd_v)
    , n_head(n_head), n_embd_k(n_embd_k), n_embd_v(n_embd_v), type_k(type_k), logits(logits)
    , rounded(n_head*n_embd_k), gram(n_head*n_head), root(n_head*n_head), weights(n_head*n_head), target(n_head), shares(n_head*n_head) {}

double synthetic_cells::product(double logit) const {
    if (logits.cap > 0.0f) {
        logit = logits.cap*std::atanh(std::clamp(logit/logits.cap, -0.9999, 0.9999));
    }
    return logit/logits.scale;
}

double synthetic_cells::logit(double product) const {
    return logits.capped(product*logits.scale);
}

static double dot(const float * a, const float * b, int64_t n) {
    // the sums are independent, so that an addition need not wait for the previous one
    double sum[4] = {};
    for (int64_t e = 0; e < n; e += 4) {
        for (int64_t i = e; i < std::min(e + 4, n); ++i) {
            sum[i - e] += (double) a[i]*b[i];
        }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

void synthetic_cells::round(float * x, int64_t n, ggml_type type) {
    if (type == GGML_TYPE_F16) {
        for (int64_t e = 0; e < n; ++e) {
            x[e] = std::clamp(x[e], -65000.0f, 65000.0f);
        }
        halves.resize(n);
        to_half (x, halves.data(), n);
        to_float(type, halves.data(), x, n);
    } else if (type != GGML_TYPE_F32) {
        bytes.resize(ggml_row_size(type, n));
        from_float(type, x, bytes.data(), n);
        to_float  (type, bytes.data(), x, n);
    }
}

void synthetic_cells::refine(float * k, const std::vector<double> & key, int c) const {
    // errors[j]: error of the product of query j and the quantized key k. deltas[j]: change of errors[j] if the current
    // element is replaced
    std::vector<double> errors(n_head), deltas(n_head);
    for (int j = 0; j < n_head; ++j) {
        for (int64_t e = 0; e < n_embd_k; ++e) {
            errors[j] += (k[e] - key[e])*rounded[j*n_embd_k + e];
        }
    }

    const int64_t n_block = ggml_blck_size(type_k);
    for (int64_t first = 0; first < n_refine*n_embd_k; first += n_block) {
        const int64_t begin = first % n_embd_k;

        // every quantized type of a cache stores the scale at the start of a block
        ggml_fp16_t scale;
        memcpy(&scale, bytes.data() + ggml_row_size(type_k, begin), sizeof(scale));
        const float step = std::fabs(ggml_fp16_to_fp32(scale));

        // keep the smallest and the largest element, because the cache computes the scale from them
        const auto  ends = std::minmax_element(k + begin, k + begin + n_block);
        const float min  = *ends.first;
        const float max  = *ends.second;

        for (int64_t e = begin; e < begin + n_block; ++e) {
            const float x = k[e] < key[e] ? k[e] + step : k[e] - step;
            if (std::min(k[e], x) <= min || std::max(k[e], x) >= max) {
                continue;
            }
            double change = 0.0;
            for (int j = 0; j < n_head; ++j) {
                deltas[j] = (double) (x - k[e])*rounded[j*n_embd_k + e];
                change += (j == c ? 1.0 : other_head_weight)*deltas[j]*(2.0*errors[j] + deltas[j]);
            }
            if (change < 0.0) {
                k[e] = x;
                for (int j = 0; j < n_head; ++j) {
                    errors[j] += deltas[j];
                }
            }
        }
    }
}

template <typename F>
void synthetic_cells::set_shares(const std::vector<double> & sums, F && product_of) {
    for (int j = 0; j < n_head; ++j) {
        for (int c = 0; c < n_head; ++c) {
            shares[j*n_head + c] = std::exp(logit(product_of(j, c)) - sums[j]);
        }
    }
}

void synthetic_cells::set_keys() {
    std::vector<double> key(n_embd_k);
    for (int c = 0; c < n_head; ++c) {
        std::fill(key.begin(), key.end(), 0.0);
        for (int i = 0; i < n_head; ++i) {
            const double  w = weights[c*n_head + i];
            const float * x = rounded.data() + i*n_embd_k;
            for (int64_t e = 0; e < n_embd_k; ++e) {
                key[e] += w*x[e];
            }
        }
        float * k = keys.data() + c*n_embd_k;
        std::copy(key.begin(), key.end(), k);
        round(k, n_embd_k, type_k);
        if (ggml_is_quantized(type_k)) {
            refine(k, key, c);
        }
    }
}

void synthetic_cells::make(const float * queries, const double * log_sums, const float * attn_out) {
    const int g = n_head;

    std::copy_n(queries, g*n_embd_k, rounded.begin());
    if (type_k == GGML_TYPE_F16) {
        // if keys are F16, attention rounds the queries to F16
        round(rounded.data(), rounded.size(), type_k);
    }

    // a head that pays no attention to the archive gets a very low logit
    std::vector<double> sums(log_sums, log_sums + g);
    const double max = *std::max_element(sums.begin(), sums.end());
    double min = std::isfinite(max) ? max : 0.0;
    for (const double x : sums) {
        min = std::isfinite(x) ? std::min(min, x) : min;
    }
    for (double & x : sums) {
        x = std::isfinite(x) ? x : min - 100.0;
    }

    double mean = 0.0;
    for (int i = 0; i < g; ++i) {
        for (int j = 0; j <= i; ++j) {
            gram[i*g + j] = gram[j*g + i] = dot(rounded.data() + i*n_embd_k, rounded.data() + j*n_embd_k, n_embd_k);
        }
        mean += gram[i*g + i]/g;
    }
    root = gram;
    for (int i = 0; i < g; ++i) {
        root[i*g + i] += ridge*mean + 1e-30;
    }
    factor(root, g);

    const double off_diagonal = off_diagonal_share(g);
    const double diagonal     = 1.0 - (g - 1)*off_diagonal;

    for (int c = 0; c < g; ++c) {
        double * products = weights.data() + c*g;
        for (int j = 0; j < g; ++j) {
            products[j] = product(sums[j] + std::log(j == c ? diagonal : off_diagonal));
        }
        solve(root, products, g);
    }

    // The ridge shifts a head's logits on all cells by about the same amount, which makes the head's softmax sum wrong.
    // Adding the same combination of queries to all keys shifts the logits of each head back by the head's error
    for (int n = 0; n < n_correction; ++n) {
        set_shares(sums, [&](int head, int cell) {
            double x = 0.0;
            for (int i = 0; i < g; ++i) {
                x += gram[head*g + i]*weights[cell*g + i];
            }
            return x;
        });
        for (int j = 0; j < g; ++j) {
            double sum = 0.0;
            for (int c = 0; c < g; ++c) {
                sum += shares[j*g + c];
            }
            target[j] = -std::log(sum)/logits.scale;
        }
        solve(root, target.data(), g);
        for (int c = 0; c < g; ++c) {
            for (int i = 0; i < g; ++i) {
                weights[c*g + i] += target[i];
            }
        }
    }

    set_keys();
    set_shares(sums, [&](int head, int cell) { return dot(rounded.data() + head*n_embd_k, keys.data() + cell*n_embd_k, n_embd_k); });

    for (int j = 0; j < g; ++j) {
        double sum = 0.0;
        for (int c = 0; c < g; ++c) {
            sum += shares[j*g + c];
        }
        for (int c = 0; c < g; ++c) {
            shares[j*g + c] /= sum;
        }
    }

    set_values(attn_out, off_diagonal, diagonal);
}

void synthetic_cells::set_values(const float * attn_out, double off_diagonal, double diagonal) {
    const int g = n_head;

    // For each head, the values of all cells, weighted by the head's shares, must add up to the head's attention
    // output. Therefore the values are `inverse`*`attn_out`, where `inverse` is the inverse of the matrix `shares`.
    // This matrix is nearly singular if queries are nearly equal. A small ridge therefore pulls `inverse` towards
    // `intended_inverse`, the inverse of the matrix of intended shares
    std::vector<double> square(g*g), inverse(g*g), residual(g);
    for (int i = 0; i < g; ++i) {
        for (int c = 0; c < g; ++c) {
            square[i*g + c] = i == c ? 1e-8 : 0.0;
            for (int j = 0; j < g; ++j) {
                square[i*g + c] += shares[j*g + i]*shares[j*g + c];
            }
        }
    }
    factor(square, g);

    const auto intended_inverse = [&](int c, int head) { return ((c == head) - off_diagonal)/(diagonal - off_diagonal); };
    for (int head = 0; head < g; ++head) {
        std::vector<double> x(g, 0.0);
        for (int j = 0; j < g; ++j) {
            residual[j] = j == head;
            for (int c = 0; c < g; ++c) {
                residual[j] -= shares[j*g + c]*intended_inverse(c, head);
            }
        }
        for (int c = 0; c < g; ++c) {
            for (int j = 0; j < g; ++j) {
                x[c] += shares[j*g + c]*residual[j];
            }
        }
        solve(square, x.data(), g);
        for (int c = 0; c < g; ++c) {
            inverse[c*g + head] = intended_inverse(c, head) + x[c];
        }
    }

    for (int c = 0; c < g; ++c) {
        for (int64_t e = 0; e < n_embd_v; ++e) {
            double sum = 0.0;
            for (int head = 0; head < g; ++head) {
                sum += inverse[c*g + head]*attn_out[head*n_embd_v + e];
            }
            values[c*n_embd_v + e] = sum;
        }
    }
}

} // namespace kvtool
