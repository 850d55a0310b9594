"""Commands without a GPU: a simulated worker, and a demonstration with several."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvrouter.commands.options import fail, given


def simulate(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 binds a free one.")] = 0,
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "simulated",
    adapter: Annotated[list[str] | None, typer.Option(help="Name of a LoRA adapter; repeatable.")] = None,
    api_key: Annotated[str, typer.Option(help="API key that requests need, as vLLM's --api-key.")] = "",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks in the cache of each DP rank.")] = 4096,
    dp_size: Annotated[int, typer.Option(help="Number of DP ranks.")] = 1,
    host_blocks: Annotated[int, typer.Option(help="Blocks in the host tier of each DP rank; 0: none.")] = 0,
    pull_port: Annotated[int, typer.Option(help="Port of rank 0's host tier, which others pull from.")] = 5710,
    prefix_caching: Annotated[bool, typer.Option(help="Cache computed blocks for later prompts.")] = True,
    max_model_len: Annotated[int, typer.Option(help="Limit of prompt and answer in tokens.")] = 32768,
    prefill_ms: Annotated[float, typer.Option(help="Milliseconds to compute one uncached prompt token.")] = 0.15,
    step_ms: Annotated[float, typer.Option(help="Minimal milliseconds of a step, which is one token.")] = 5.0,
    encoder_items: Annotated[int, typer.Option(help="Encoded images, audio and video that are kept.")] = 64,
    kv_events: Annotated[str | None, typer.Option(help="Publisher configuration as JSON, in SGLang's form.")] = None,
    disaggregation: Annotated[Literal["sglang", "nixl"] | None, typer.Option(help="Style of KV transfer.")] = None,
    role: Annotated[
        Literal["prefill", "decode", "encode"] | None, typer.Option(help="Role; prefill, decode need --disaggregation.")
    ] = None,
    bootstrap_port: Annotated[int, typer.Option(help="Port of a prefill worker's bootstrap service; 0: free.")] = 0,
) -> None:
    """Run a simulated worker: real cache, scheduler, events and API, but random words."""
    from simulator.worker import SimulatedWorkerSettings
    from simulator.worker.serve import run
    from worker.publisher import PublisherConfig

    try:
        options = given(
            kv_events=kv_events and PublisherConfig.from_json(kv_events), disaggregation=disaggregation, role=role
        )
        settings = SimulatedWorkerSettings(
            host=host,
            port=port,
            model=model,
            adapters=tuple(adapter or ()),
            api_key=api_key,
            block_size=block_size,
            num_blocks=blocks,
            dp_size=dp_size,
            host_blocks=host_blocks,
            pull_port=pull_port,
            prefix_caching=prefix_caching,
            max_model_len=max_model_len,
            prefill_s_per_token=prefill_ms / 1000,
            base_step_s=step_ms / 1000,
            encoder_items=encoder_items,
            bootstrap_port=bootstrap_port,
            **options,
        )
        run(settings)
    except (ValueError, OSError) as error:
        fail(error)


def demo(
    workers: Annotated[int, typer.Option(min=1, help="Number of simulated workers.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Number of conversations, each of several requests.")] = 48,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the router running at the end.")] = False,
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Show disaggregation instead, with a killed prefill worker.")
    ] = False,
    encoders: Annotated[
        bool, typer.Option("--encoders", help="Show encode workers instead, with one of them killed.")
    ] = False,
) -> None:
    """Compare kv-aware routing with round robin on simulated workers.

    --disaggregated plays the conversations on 2 prefill and 2 decode workers, first in SGLang's style and then in that
    of vLLM with NIXL. It kills a prefill worker. --encoders sends chats with images to 3 encode workers and 2 others,
    and kills an encode worker. Each exits with 0 if no request is lost.
    """
    from kvrouter.tools.demo import run_demo
    from kvrouter.tools.demo.run import DemoError

    try:
        if disaggregated:
            from kvrouter.tools.demo.disaggregated import run_disaggregated_demo

            if not run_disaggregated_demo(conversations):
                raise typer.Exit(1)
            return
        if encoders:
            from kvrouter.tools.demo.encoders import run_encoders_demo

            if not run_encoders_demo(conversations):
                raise typer.Exit(1)
            return
        run_demo(workers, conversations, keep)
    except DemoError as error:
        fail(error)
