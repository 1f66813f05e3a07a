/* Replaces the header of this name if NVIDIA's package nvidia-cuda-crt is not installed, because CUDA's other
   headers include it. The original checks the host compiler for device code, and there is none here. */
#pragma once
