"""Out of memory is recognised without torch."""

import errno

import pytest

from batchwright._oom import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error and nothing else of it."""


class XlaRuntimeError(RuntimeError):
    """JAX's."""


class AcceleratorError(RuntimeError):
    """torch's, since 2.8."""


class DistBackendError(RuntimeError):
    """torch.distributed's."""


class OutOfResources(Exception):
    """Triton's."""


# Texts as users reported them.
YES = [
    OutOfMemoryError("no words"),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/"),
    RuntimeError("cudaErrorMemoryAllocation"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("HIP out of memory. Tried to allocate 1 GiB"),
    RuntimeError("HIP error: hipErrorOutOfMemory"),
    RuntimeError("NPU out of memory. Tried to allocate 1 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError("Invalid buffer size: 9.75 GB"),
    RuntimeError(
        "Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
    ),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("Native API failed. Native API returns: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"),
    RuntimeError("Current platform can NOT allocate memory block with size larger than 4GB!"),
    RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::40969728 (39.0717)MB"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    DistBackendError(
        "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    DistBackendError("ncclUnhandledCudaError\nLast error:\nFailed to CUDA calloc 6291456 bytes"),
    XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."),
    XlaRuntimeError("INTERNAL: Failed to allocate request for 1.00GiB (1073741824B) on device ordinal 0"),
    RuntimeError("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 8388608"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: not enough memory: you tried to allocate"),
    RuntimeError("unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
    OSError(12, "Cannot allocate memory"),
    OSError(errno.ENOMEM, "fork failed"),
]  # fmt: skip
NO = [
    RuntimeError("shape mismatch"),
    ValueError("out of memory is what this text is about"),
    KeyError("out of memory"),
    KeyboardInterrupt(),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError("Cannot allocate memory is only a text here"),
    FileNotFoundError(2, "No such file", "out of memory.txt"),
    # A kernel that asks for too much shared memory does so for a batch of any size.
    OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376."),
    RuntimeError("Triton Error: out of resource: shared memory, Required: 131072, Hardware limit: 101376."),
    RuntimeError("level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if the input is not contiguous."),
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`"),
    DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error\nCuda failure 1 'invalid argument'"),
    RuntimeError("failed to allocate port 29500"),
    RuntimeError("index 12 is out of bounds for dimension 0 with size 4"),
    # What happens in a loader's process is not helped by a smaller piece of the batch.
    RuntimeError("DataLoader worker (pid(s) 17) exited unexpectedly"),
    RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed."),
    RuntimeError(
        "DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that dataloader's workers are out "
        "of shared memory. Please try to raise your shared memory limit."
    ),
    MemoryError("Caught MemoryError in DataLoader worker process 0."),
]  # fmt: skip


def words(error):
    return f"{type(error).__name__} {error}"[:60]


@pytest.mark.parametrize("error", YES, ids=words)
def test_it_is_recognised_by_class_or_text(error):
    # Before, cudaErrorMemoryAllocation, std::bad_alloc, OSError(12), cuDNN's, Metal's, Level Zero's and XLA's texts
    # were not.
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", NO, ids=words)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


def raised(action):
    """The error that an action raises, with what Python notes about where it came from."""
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_it_is_recognised_as_the_cause_of_another_error():
    def deep():
        try:
            try:
                raise MemoryError
            except MemoryError as error:
                raise KeyError("state") from error
        except KeyError as error:
            raise ValueError("the model failed") from error

    assert is_out_of_memory(raised(deep))


def test_an_error_of_its_own_in_an_except_block_is_not_hidden():
    # Before, this KeyError was taken for running out of memory, and the batch ran again in smaller pieces.
    def clumsy():
        try:
            raise OutOfMemoryError("CUDA out of memory")
        except OutOfMemoryError:
            {}["typo"]

    error = raised(clumsy)
    assert isinstance(error.__context__, OutOfMemoryError)
    assert not is_out_of_memory(error)


def test_an_error_after_one_that_was_dealt_with_is_not_hidden():
    def dealt_with():
        try:
            raise MemoryError
        except MemoryError:
            raise RuntimeError("shape mismatch") from None

    assert not is_out_of_memory(raised(dealt_with))


def test_the_torch_errors_themselves_are_recognised():
    torch = pytest.importorskip("torch")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    error = raised(lambda: torch.empty(1 << 60, dtype=torch.uint8))
    assert isinstance(error, RuntimeError)
    assert is_out_of_memory(error)


def test_it_is_recognised_inside_what_a_compiler_of_torch_raises():
    exc = pytest.importorskip("torch._dynamo.exc")
    assert is_out_of_memory(exc.BackendCompilerFailed(print, MemoryError(), None))
    assert is_out_of_memory(exc.BackendCompilerFailed(print, RuntimeError("CUDA out of memory"), None))
    assert is_out_of_memory(exc.InternalTorchDynamoError("OutOfMemoryError: CUDA out of memory. Tried to allocate"))
    assert not is_out_of_memory(exc.BackendCompilerFailed(print, KeyError("x"), None))


def test_a_loader_that_runs_out_in_its_own_process_is_another_matter():
    torch = pytest.importorskip("torch")

    class Hungry(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="in DataLoader worker process 0") as caught:
        next(iter(torch.utils.data.DataLoader(Hungry(), num_workers=1, multiprocessing_context="fork")))
    assert not is_out_of_memory(caught.value)
