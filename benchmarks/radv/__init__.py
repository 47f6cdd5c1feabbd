"""RADV, Mesa's compiler for AMD's cards, asked what it makes of kernels without such a card."""
