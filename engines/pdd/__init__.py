"""The built-in engine: Prefill, RelayDecode, MainDecode over two sites, and the policies it is compared to."""
