"""``python -m qlora_wgpu``."""

from qlora_wgpu.cli import main

if __name__ == "__main__":
    main()
