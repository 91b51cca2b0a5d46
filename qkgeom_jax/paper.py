"""What the paper reports in its Tables 3 to 6, as plain data, to stand beside what is measured here.

Source: "Query Expansion and Key Specialization in Transformer Attention Geometry", arXiv:2609.34273. A pair is a mean
and what the paper writes after the plus-minus sign.
"""

SOURCE = "Query Expansion and Key Specialization in Transformer Attention Geometry, arXiv:2609.34273"

# Final loss and alignment by query/key initialisation.
TABLE_3 = {
    "qk_identical": {
        "runs": 12,
        "final_val_loss": (1.1907, 0.0106),
        "final_alignment": (0.4530, 0.0950),
        "depth_8_alignment": (0.5048, 0.0861),
    },
    "disjoint_support": {
        "runs": 12,
        "final_val_loss": (1.1969, 0.0112),
        "final_alignment": (0.1991, 0.0151),
        "depth_8_alignment": (0.1911, 0.0077),
    },
    "independent": {
        "runs": 12,
        "final_val_loss": (1.1973, 0.0108),
        "final_alignment": (0.1895, 0.0227),
        "depth_8_alignment": (0.1799, 0.0241),
    },
}

# Slopes of the participation ratios (PR) of queries and keys over seed-averaged layer trajectories.
TABLE_4 = {
    "all": {
        "n": 54,
        "pr_q_slope": (0.1406, 0.0902),
        "pr_k_slope": (-0.0437, 0.0565),
        "pr_difference_slope": (0.1843, 0.0966),
    },
    "uncoupled": {
        "n": 36,
        "pr_q_slope": (0.1366, 0.0932),
        "pr_k_slope": (-0.0539, 0.0547),
        "pr_difference_slope": (0.1904, 0.0930),
    },
    "qk_identical": {
        "n": 18,
        "pr_q_slope": (0.1487, 0.0859),
        "pr_k_slope": (-0.0235, 0.0561),
        "pr_difference_slope": (0.1722, 0.1051),
    },
}

# The abstract: "PR_Q - PR_K is positive in all trajectories studied"; level or slope is left open.
POSITIVE_TRAJECTORIES = {"all": 54, "uncoupled": 36, "qk_identical": 18}

# Interventions over five seeds; confidence is the share of seed-metric comparisons with the aggregate's sign.
TABLE_5 = {
    "none": {
        "val_loss": 1.2066, "attention_entropy": 2.1893, "logit_std": 4.4329, "effective_rank_qk": 9.71,
        "confidence": None,
    },
    "k_spectrum_clamp": {
        "val_loss": 1.2159, "attention_entropy": 2.2888, "logit_std": 3.5898, "effective_rank_qk": 11.13,
        "confidence": 1.00,
    },
    "forced_k_contraction": {
        "val_loss": 1.2270, "attention_entropy": 2.0809, "logit_std": 5.4071, "effective_rank_qk": 6.03,
        "confidence": 1.00,
    },
    "freeze_q": {
        "val_loss": 1.2196, "attention_entropy": 2.5532, "logit_std": 3.5915, "effective_rank_qk": 9.35,
        "confidence": 0.93,
    },
    "freeze_k": {
        "val_loss": 1.2172, "attention_entropy": 2.6002, "logit_std": 3.2136, "effective_rank_qk": 10.83,
        "confidence": 1.00,
    },
    "qk_decouple": {
        "val_loss": 1.2115, "attention_entropy": 1.7432, "logit_std": 5.0723, "effective_rank_qk": 9.92,
        "confidence": 0.93,
    },
}  # fmt: skip

# Public checkpoint series: in how many of a family's series each statement holds.
TABLE_6 = {
    "pythia": {
        "models": 3, "pr_difference_slope_positive": 1, "pr_q_slope_positive": 0, "pr_k_slope_negative": 3,
        "bridge_comovement": 3,
    },
    "smollm2": {
        "models": 2, "pr_difference_slope_positive": 0, "pr_q_slope_positive": 0, "pr_k_slope_negative": 0,
        "bridge_comovement": 0,
    },
    "gpt2": {
        "models": 1, "pr_difference_slope_positive": 0, "pr_q_slope_positive": 1, "pr_k_slope_negative": 0,
        "bridge_comovement": 1,
    },
    "all": {
        "models": 6, "pr_difference_slope_positive": 1, "pr_q_slope_positive": 1, "pr_k_slope_negative": 3,
        "bridge_comovement": 4,
    },
}  # fmt: skip
