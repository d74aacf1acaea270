"""vLLM as a side of the engine benchmark. Runs in its own environment (`.venv-vllm`, made by `make
test-vllm`), where nothing of Roost is installed. Speaks as `benchmarks.rig.generator`.

    .venv-vllm/bin/python benchmarks/rig/vllm/generator.py CHECKPOINT THREADS
"""

import json
import os
import sys
import time

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(checkpoint: str, threads: str) -> None:
    # vLLM prints to standard output, which carries the results here.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=threads)
    from vllm import LLM, SamplingParams  # only in that environment

    model = LLM(
        checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        block_size=32,
        enable_prefix_caching=False,
    )
    print(json.dumps({"ready": True}), file=results, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=batch["tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": one} for one in batch["prompts"]]
        start = time.perf_counter()
        answers = model.generate(prompts, sampling, use_tqdm=False)
        found = {
            "seconds": time.perf_counter() - start,
            "outputs": [list(answer.outputs[0].token_ids) for answer in answers],
        }
        print(json.dumps(found), file=results, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
