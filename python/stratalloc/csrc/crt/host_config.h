/* Stands in for the header of this name where NVIDIA's package nvidia-cuda-crt is not installed: CUDA's other
   headers include it. It checks compilers of device code, and there is none here. */
#pragma once
