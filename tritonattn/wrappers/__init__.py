"""What FlashInfer's plan/run classes in `decode` and `prefill` have in common.

`base` the step that is planned once and run by every layer, `metadata` the tables of a step and the
fixed buffers of graph mode, `arguments` what `plan()` fixes for all layers.
"""
