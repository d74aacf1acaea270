"""Token ids of prompts: tokenizers, and the caches that avoid tokenizing conversations twice."""
