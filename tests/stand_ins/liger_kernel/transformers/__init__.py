from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

__all__ = ["_apply_liger_kernel_to_instance"]
