"""Token ids of prompts: tokenizers, and the caches that keep conversations from being tokenised twice."""
