"""Peak memory and time of loss + backward: chunked log-probs against plain log_softmax + gather.

    python tests/bench_logps.py                 (about four minutes on two cores; --quick: a small vocabulary, seconds)

One subprocess per case, so that the peak of one does not hide in another's. Memory is the process's peak resident size
(ru_maxrss) above its value once the model is loaded and its gradients are allocated; time is the median of three after one warm-up.
"""
import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def case(kind, vocab, hidden, tokens, chunk_size):
    """Peak MB above the loaded model and median seconds of one case; runs in its own process."""
    import torch
    from common import chunked_logps
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocab, bias=False)
    head.weight.grad = torch.zeros_like(head.weight)
    h, y = torch.randn(tokens, hidden, requires_grad=True), torch.randint(vocab, (tokens,))
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(4):
        start = time.perf_counter()
        if kind == "plain":
            logps = head(h).log_softmax(-1).gather(1, y[:, None])[:, 0]
        else:
            logps = chunked_logps(h, head, y, 1.0, chunk_size)[0]
        logps.mean().backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"mb": (peak - before) / 1024, "seconds": statistics.median(seconds[1:])}))


def run(*values):
    done = subprocess.run([sys.executable, __file__, "--case", *map(str, values)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", nargs=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.case:
        case(options.case[0], *map(int, options.case[1:]))
        sys.exit()
    large, small = (8192, 2048) if options.quick else (151_936, 32_000)
    chunk = 32 if options.quick else 128
    print(f"{'vocabulary':>10} {'hidden':>6} {'tokens':>6} {'chunk':>5} | {'plain MB':>8} {'chunked MB':>10} {'ratio':>6} | {'plain s':>7} {'chunked s':>9} {'ratio':>6}")
    for vocab, hidden, tokens in [(large, 64, 2048), (large, 64, 1024), (small, 64, 2048), (large, 512, 512), (large, 1024, 512)]:
        plain, chunked = run("plain", vocab, hidden, tokens, chunk), run("chunked", vocab, hidden, tokens, chunk)
        print(f"{vocab:>10} {hidden:>6} {tokens:>6} {chunk:>5} | {plain['mb']:>8.0f} {chunked['mb']:>10.0f} {chunked['mb'] / plain['mb']:>6.2f} | "
              f"{plain['seconds']:>7.2f} {chunked['seconds']:>9.2f} {chunked['seconds'] / plain['seconds']:>6.2f}", flush=True)
