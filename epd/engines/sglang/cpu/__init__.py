"""What the real SGLang needs on a machine without CUDA; nothing here acts where CUDA is.

SGLang 0.5.23 serves Qwen's vision-language models on a CPU, for development and tests, once three
gaps are filled. They are all here and nowhere else:

- `stand_ins`: modules and operators that SGLang and torchvision import but that have no CPU build.
  They must exist before SGLang is imported, so `epd.engines.sglang.serve` installs them.
- `plugin`: two places where SGLang assumes GPU memory, corrected through its own plugin route
  (entry point `sglang.srt.plugins`), which SGLang calls in each of its processes.
- `settings`: flags and environment of a CPU server.

No file of SGLang is changed. How to install it for a CPU: scripts/setup-sglang.sh.
"""
