"""Shaders as Windows and macOS get them: by naga, and on by Direct3D's own compilers under Wine."""
