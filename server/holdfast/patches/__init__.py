"""Every change to vLLM's own code. Runs in the front end and in vLLM's processes.

`PATCHES` lists everything in Holdfast that replaces code of vLLM, of the standard library, or of
another library, or sets an attribute of their objects. A class of ours that derives from one of
theirs replaces code where it overrides a name with one underscore in front, or any name of a class
of vLLM or uvicorn, which promise no class to derive from. It replaces nothing where it defines an
abstract method, a name with two underscores in front, or what is public in another library, such as
`logging.Handler.emit` and `threading.Thread.run`.

Most of that code is in this package; some stays with what it serves, and `by` names it. If a patch
that a guarantee needs does not fit, the start ends with exit 3. Any other patch that does not fit
is left out with a warning.
This module imports nothing heavy: the fork server and every worker import it.

    patch                            what a patch is, and whether its sites exist
    chunks, rendering                make chats faster
    parameters, tokenizer            bound the parameters and the texts of requests
    request_bodies, pooling          bound their bodies; what pooling models take of the front end
    responses                        bounds what `/v1/responses` makes vLLM keep
    harmony, templates               bounds the prompts of gpt-oss; refuses templates of clients
    beam_search                      keeps a request's capacity through a beam search
    adapters, media_names            bound names of unknown models; keep the media of keys apart
    error_messages, log_lines        bound what errors and logs repeat of requests
    answer_parsing                   bounds the search of an answer for reasoning and tool calls
    tool_calls, tool_call_defects    count broken tool calls; what is wrong with one
    broken_responses                 ends a response that cannot go on with an error
    front_end, engine                what the front end does, and the engine's processes do
    media_cache                      keeps processed media in the front end
    continued, thinking_budgets      go on with an answer of another engine
    grammars, grammar_compilation    bound the grammars in an EngineCore, and their compilation
    grammar_steps, grammar_memory    bound what one step and the memory of grammars take
    adapter_slots                    makes a pinned adapter the last one to lose its slot
    stat_logger                      keeps vLLM's metrics across generations
"""

from __future__ import annotations

from holdfast.patches.patch import Patch, Process, is_fit, require

_BASE = "vllm.renderers.base:BaseRenderer"
_HF = "vllm.renderers.hf:HfRenderer"
_CHAT = "vllm.entrypoints.openai.chat_completion.serving"
_BATCH = "vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch"
_GENERATE = "vllm.entrypoints.generate.base.serving:GenerateBaseServing"
_BEAMS = "vllm.entrypoints.generate.beam_search.online"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
_RESPONSE_TYPES = "vllm.entrypoints.openai.responses.protocol"
_REALTIME = "vllm.entrypoints.speech_to_text.realtime.connection:RealtimeConnection"
_MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels"
_MESSAGES = "vllm.renderers.chat_utils"
_PART = "_parse_chat_message_content_part"
_DECISIONS = "vllm.entrypoints.generate.structured_decisions"
_READ = "ReadPromptRequest.build_chat_params"
_LOGGERS = "vllm.v1.metrics.loggers"
_STATS = f"{_LOGGERS}:PrometheusStatLogger"
_SPEECH = "vllm.entrypoints.speech_to_text.base.serving"
_SCORING = "vllm.entrypoints.generate.generative_scoring.serving"
_SAMPLING = "vllm.sampling_params:SamplingParams"
_STATE = "vllm.v1.engine.output_processor:RequestState"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_GRAMMAR = "vllm.v1.structured_output.request:StructuredOutputRequest"
_CONSTRAINT = "vllm.sampling_params:StructuredOutputsParams"
_BUDGETS = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"
_PARSER = "vllm.parser.abstract_parser:Parser"
_TOKENIZER = "vllm.tokenizers.protocol:TokenizerLike"
_PLATFORM = "vllm.platforms.interface:Platform"
_HTTP = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
_WEBSOCKET = "uvicorn.protocols.websockets.websockets_sansio_impl:WebSocketsSansIOProtocol"
_ISSUE = "https://github.com/vllm-project/vllm/issues/"

PATCHES: tuple[Patch, ...] = (
    # What makes requests faster
    Patch(
        "patches.chunks.write_text_directly",
        "front end",
        (
            f"{_CHAT}:DeltaMessage",
            f"{_CHAT}:ChatCompletionResponseStreamChoice",
            f"{_CHAT}:ChatCompletionStreamResponse",
        ),
        "vLLM builds three models per token, 9 of the 60 to 80 us that a token takes",
        is_guarantee=False,
    ),
    Patch(
        "patches.rendering.render_short_prompts_at_once",
        "front end",
        (
            f"{_BASE}._tokenize_prompt_async",
            f"{_BASE}.tokenize_prompts_async",
            f"{_HF}._apply_chat_template_async",
            f"{_HF}._render_with_timeout",
            f"{_HF}._replace_executor",
            "vllm.renderers.base:asyncio",
        ),
        "handing a prompt to a thread twice is a tenth of the time to first token at 16 clients",
        is_guarantee=False,
    ),
    Patch(
        "engine.openai_app.put_frequent_first",
        "front end",
        ("starlette.routing:Router.routes",),
        "a chat is compared with 10 routes of ours and 34 of vLLM's, for 34 us of its 2 ms",
        is_guarantee=False,
        seen_in="starlette 1.10.0",
    ),
    Patch(
        "api.openapi.publish",
        "front end",
        ("fastapi.applications:FastAPI.openapi_url", "starlette.routing:Router.routes"),
        "vLLM's route to the document of the API blocks the event loop for 1 s",
        is_guarantee=False,
        seen_in="fastapi 0.136.3 with starlette 1.10.0",
    ),
    # What keeps the front end alive and fair
    Patch(
        "patches.answer_parsing.bound_answer_parsers",
        "front end",
        (
            "vllm.parser:ParserManager.get_parser",
            "vllm.parser.engine.incremental_lexer:IncrementalLexer.feed",
            "vllm.parser.engine.incremental_lexer:LexToken.token_count",
            "vllm.parser.engine.incremental_lexer:LexToken.value",
            "vllm.parser.engine.parser_engine:ParserEngine._events_to_delta",
            f"{_PARSER}.parse",
            f"{_PARSER}.parse_delta",
        ),
        "parsing on the event loop takes time quadratic in an answer's length: minutes",
        upstream=f"{_ISSUE}57677",
    ),
    Patch(
        "patches.tokenizer.bound_tokenizer",
        "front end",
        (
            f"{_BASE}.tokenizer",
            f"{_TOKENIZER}.__call__",
            f"{_TOKENIZER}.encode",
            f"{_TOKENIZER}.decode",
            f"{_TOKENIZER}.apply_chat_template",
        ),
        "a text of 30 MB takes the tokenizer 90 s and 8 GB",
        upstream=f"{_ISSUE}31229",
    ),
    Patch(
        "patches.parameters.bound_parameters",
        "front end",
        (
            f"{_SAMPLING}._verify_args",
            f"{_SAMPLING}.update_from_generation_config",
            f"{_SAMPLING}.update_from_tokenizer",
        ),
        "31 MB of stop strings with n = 128 take 4 GB in each process of the engine; 1,025 entries "
        "of `logit_bias` end it on the V2 runner",
    ),
    Patch(
        "patches.parameters.bound_batches",
        "front end",
        (f"{_BATCH}.create_batch_chat_completion",),
        "all parameters are copied and validated for each of 16,384 chats, on the event loop",
    ),
    Patch(
        "patches.parameters.bound_request_ids",
        "front end",
        ("vllm.entrypoints.serve.engine.serving:BaseServing._base_request_id",),
        "each event of a stream repeats a `request_id` of any length",
    ),
    Patch(
        "patches.responses.bound_responses",
        "front end",
        (
            f"{_RESPONSES}.create_responses",
            f"{_RESPONSE_TYPES}:ResponsesRequest.background",
            f"{_RESPONSE_TYPES}:ResponsesRequest.request_id",
            f"{_RESPONSE_TYPES}:ResponsesRequest.store",
        ),
        'the same of a response; with `"store": "false"`, a response in the background is kept '
        "forever, up to 30 MB each",
    ),
    Patch(
        "patches.parameters.bound_length_penalty",
        "front end",
        (f"{_BEAMS}:create_sort_beams_key_function",),
        "a `length_penalty` of -10,000 is a 500",
    ),
    Patch(
        "patches.beam_search.mark_beam_searches",
        "front end",
        (f"{_BEAMS}:BeamSearchOnlineMixin.beam_search",),
        "each beam of each token looks like a request, with the prompt and a wait of its own",
    ),
    Patch(
        "patches.parameters.keep_token_texts",
        "front end",
        ("vllm.v1.engine.logprobs:convert_ids_list_to_tokens",),
        "log-probs of a prompt of 32,000 tokens block the event loop for 6 s",
    ),
    Patch(
        "patches.media_names.own_media_names",
        "front end",
        (
            f"{_MESSAGES}:{_PART} or {_MESSAGES}.chat_message:{_PART.removeprefix('_')}",
            "vllm.entrypoints.pooling.base.io_processor:make_async",
        ),
        "with the name of another key's image, a client can ask about it, or replace it",
    ),
    Patch(
        "patches.tokenizer.bound_tool_calls",
        "front end",
        (f"{_MESSAGES}:_postprocess_messages or {_MESSAGES}.chat_message:_postprocess_messages",),
        "arguments of tool calls are parsed on the event loop, at any size and depth",
    ),
    Patch(
        "patches.tokenizer.score_in_a_thread",
        "front end",
        (f"{_SCORING}:ServingGenerativeScoring._build_prompts",),
        "the texts of `/generative_scoring` are tokenized on the event loop",
    ),
    Patch(
        "patches.harmony.bound_harmony",
        "front end",
        (
            "vllm.renderers.online_renderer:render_for_completion",
            "vllm.renderers.online_renderer:OnlineRenderer.render_chat",
            "vllm.renderers.online_renderer:OnlineRenderer.render_responses",
            f"{_BATCH}.render_batch_chat_request",
        ),
        "a word of a megabyte in a chat with gpt-oss blocks the event loop for 7 minutes",
        upstream=f"{_ISSUE}38266",
    ),
    Patch(
        "patches.request_bodies.refuse_wrong_bodies",
        "front end",
        (
            "starlette.applications:Starlette.add_exception_handler",
            "starlette.applications:Starlette.middleware_stack",
        ),
        "a value of a wrong type in a body is a 500",
        upstream=f"{_ISSUE}35438",
        seen_in="starlette 1.10.0",
    ),
    Patch(
        "patches.request_bodies.stop_at_first_error",
        "front end",
        (
            "fastapi._compat:ModelField._type_adapter",
            "pydantic:BaseModel.__pydantic_validator__",
            "pydantic:TypeAdapter.validator",
        ),
        "200 KB of invalid messages block the event loop for 10 s and take a gigabyte; 200,000 "
        "entries of `vllm_xargs`, 8 s and 1.2 GB",
        upstream=f"{_ISSUE}49239",
        seen_in="fastapi 0.136.3 with pydantic 2.14.3",
    ),
    Patch(
        "patches.request_bodies.bound_invocations",
        "front end",
        ("vllm.entrypoints.serve.sagemaker.api_router:pydantic",),
        "its validators are made with the application, and take the same time and memory",
    ),
    Patch(
        "patches.error_messages.bound_error_messages",
        "front end",
        ("vllm.entrypoints.serve.exception_handling.utils:re",),
        "the error for a model name of 16 KB, all slashes and letters, blocks the event loop for "
        "40 s; with the bound, any message takes 8 ms at most",
        upstream=f"{_ISSUE}52120",
    ),
    Patch(
        "patches.log_lines.bound_log_lines",
        "front end",
        (
            "logging:setLogRecordFactory",
            "vllm.logger:_print_debug_once",
            "vllm.logger:_print_info_once",
            "vllm.logger:_print_warning_once",
            "vllm.logger:_print_error_once",
        ),
        "one content type of newlines writes 1 GB to the log, and 128 of them keep 4 GB of memory",
        seen_in="vLLM 0.32, 0.33 with Python 3.11 to 3.13",
    ),
    Patch(
        "patches.log_lines.escape_controls",
        "engine",
        ("vllm.logging_utils:NewLineFormatter.format",),
        "errors quote clients, who could send commands to the terminal that shows the log",
        is_guarantee=False,
    ),
    Patch(
        "patches.templates.refuse_templates",
        "front end",
        (f"{_DECISIONS}.protocol:{_READ} or vllm.entrypoints.openai.decisions.strategies:{_READ}",),
        "`/v1/systemone` renders a client's template on the event loop, without a time limit",
    ),
    Patch(
        "patches.request_bodies.bound_prompts",
        "front end",
        (f"{_BASE}.render_cmpl_async",),
        "each prompt of a request gets all its parameters, so their number counts",
    ),
    Patch(
        "patches.request_bodies.bound_inputs",
        "front end",
        ("vllm.entrypoints.pooling.base.serving:PoolingBaseServing._init_ctx",),
        "460,000 inputs of embeddings keep the thread that renders all prompts busy for minutes",
    ),
    Patch(
        "patches.request_bodies.bound_options",
        "front end",
        ("vllm.entrypoints.generate.structured_decisions.serving:build_question",),
        "4 million levels of a score keep the event loop busy for seconds before they are refused",
    ),
    Patch(
        "patches.adapters.bound_adapter_names",
        "front end",
        (
            f"{_MODELS}.__init__",
            f"{_MODELS}.lora_resolver_lock",
            f"{_MODELS}.resolve_lora",
        ),
        "each unknown name of a model, of up to 32 MB, stays in memory, and one such as `../x` is "
        "looked for outside of the adapters' directory",
    ),
    Patch(
        "patches.pooling.share_rendering",
        "front end",
        (
            "vllm.entrypoints.pooling.base.serving:PoolingBaseServing._preprocessing",
            "vllm.entrypoints.pooling.typing:PoolingServeContext.engine_inputs",
        ),
        "one `/rerank` holds the thread that renders all prompts for minutes, and one `/score` "
        "of 512 texts the event loop for 30 s",
    ),
    Patch(
        "engine.media.limits.guard_media",
        "front end",
        (
            "vllm.multimodal.media:MEDIA_CONNECTOR_REGISTRY",
            "vllm.multimodal.media:MediaConnector.load_from_url",
            "vllm.multimodal.media:MediaConnector.load_from_url_async",
            "vllm.multimodal.media:MediaConnector.fetch_audio_async",
            "vllm.multimodal.media:MediaConnector.fetch_image_async",
            "vllm.multimodal.media:MediaConnector.fetch_video_async",
            "vllm.multimodal.media.video:VideoMediaIO.image_io",
            "vllm.multimodal.image:ALLOWED_IMAGE_FORMATS",
            "vllm.connections:HTTPConnection.get_bytes",
            "vllm.connections:HTTPConnection.async_get_bytes",
            "mistral_common.tokens.tokenizers.image:download_image",
        ),
        "a client's URL may name an address of the operator's network, or decode to any size",
        upstream=f"{_ISSUE}57157",
        seen_in="vLLM 0.32, 0.33 with mistral_common 1.13.1",
    ),
    Patch(
        "engine.media.formats.check_audio",
        "front end",
        ("vllm.multimodal.media.audio:load_audio", f"{_SPEECH}:load_audio"),
        "FFmpeg reads files that make it open other files or listen on the network",
    ),
    Patch(
        "engine.media.formats.read_clips_safely",
        "front end",
        ("vllm.multimodal.video_decoders.opencv:BytesIO",),
        "a clip with one wrong bit in its index ends the server with SIGSEGV",
        seen_in="vLLM 0.32, 0.33 with opencv-python-headless 5.0.0.93",
    ),
    Patch(
        "engine.media.clips.learn_frame_sizes",
        "front end",
        (
            "vllm.multimodal.video_decoders.base:check_frame_pixel_limit",
            "vllm.multimodal.video_decoders.opencv:check_frame_pixel_limit",
        ),
        "a decoder tells nobody how large the frames are before it has decoded all of them",
    ),
    Patch(
        "engine.media.clips.counting_loader",
        "front end",
        (
            "vllm.multimodal.media.video:VideoMediaIO.video_loader",
            "vllm.multimodal.video:VideoLoader.compute_frames_index_to_sample",
        ),
        "a clip of 10 KB has a loader decode gigabytes, or list frames until the memory is full",
    ),
    Patch(
        "engine.media.realtime.bound_realtime_audio",
        "front end",
        (f"{_REALTIME}.__init__", f"{_REALTIME}.cleanup", "asyncio.queues:Queue._get"),
        "a WebSocket that appends audio and never commits takes all memory",
        upstream=f"{_ISSUE}48130",
        seen_in="vLLM 0.32, 0.33 with Python 3.11 to 3.13",
    ),
    Patch(
        "engine.media.realtime.report_wrong_events",
        "front end",
        (f"{_REALTIME}.handle_event",),
        "a message of 2 bytes that is not an event writes a traceback of 1 KB to the log",
    ),
    Patch(
        "engine.grammars.requests.check_in_workers",
        "front end",
        (
            "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar",
            "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat",
            f"{_CONSTRAINT}._backend",
            f"{_CONSTRAINT}._backend_was_auto",
            f"{_CONSTRAINT}.choice",
            f"{_CONSTRAINT}.grammar",
            "vllm.v1.engine.input_processor:InputProcessor.structured_outputs_config",
        ),
        "a client's grammar of 80 KB crashes the process that compiles it",
        upstream=f"{_ISSUE}54003",
    ),
    Patch(
        "engine.checked_llm.CheckedLLM",
        "front end",
        (
            f"{_ENGINE}.generate",
            f"{_ENGINE}.add_request",
            f"{_ENGINE}.check_admission",
            f"{_ENGINE}.abort",
            "vllm.v1.engine.core_client:EngineCoreClient.add_request_async",
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            "vllm.v1.engine.output_processor:OutputProcessor.request_states",
            f"{_STATE}.remote_prefill_cached_tokens",
            "vllm.v1.engine.core_client:BackgroundResources.engine_dead",
        ),
        "a request with a number of more than 64 bits is never removed, and calls to a stopped "
        "engine never return; sequences take turns; a request that an engine had admitted before "
        "it died would be refused by the next",
    ),
    Patch(
        "engine.proxy.EngineProxy",
        "front end",
        (
            "vllm.config.model:ModelConfig.max_model_len",
            f"{_ENGINE}.register",
        ),
        "prompts beyond the proven context would reach the engine, and `/abort_requests` without "
        "IDs would fail",
    ),
    Patch(
        "engine.worker_adapters.WorkerAdapters",
        "front end",
        ("vllm.lora.request:LoRARequest.load_inplace",),
        "an adapter that was loaded again is loaded in each step that needs it",
    ),
    Patch(
        "engine.launch.arguments._Parser",
        "front end",
        ("vllm.utils.argparse_utils:FlexibleArgumentParser.error",),
        "a wrong flag ends the process with the usage of all flags, and with no remedy",
    ),
    Patch(
        "engine.launch.arguments.make_arg_parser",
        "front end",
        ("argparse:Action.type", "argparse:ArgumentParser._actions"),
        "vLLM's `--log-level` accepts upper case alone, and uvicorn's lower case alone",
        seen_in="Python 3.11 to 3.13",
    ),
    Patch(
        "patches.front_end.accept_nulls",
        "front end",
        (
            f"{_RESPONSE_TYPES}:ResponsesRequest.background",
            f"{_RESPONSE_TYPES}:ResponsesRequest.truncation",
            f"{_RESPONSE_TYPES}:ResponsesResponse.from_request",
        ),
        "`background: null` ends a stream at its first event",
        upstream=f"{_ISSUE}48319",
    ),
    Patch(
        "patches.broken_responses.tell_broken_responses",
        "front end",
        (
            f"{_GENERATE}._convert_generation_error_to_streaming_response",
            f"{_RESPONSES}._run_background_request",
            f"{_RESPONSES}.responses_background_stream_generator",
            f"{_RESPONSES}.responses_full_generator",
            f"{_RESPONSES}.responses_stream_generator",
            f"{_RESPONSES}.retrieve_responses",
            f"{_RESPONSE_TYPES}:ResponsesResponse.status",
        ),
        "a stream of `/v1/responses` that cannot go on is cut without an error, and in the "
        "background its readers wait forever, or do not hear why it failed",
    ),
    Patch(
        "patches.broken_responses.tell_broken_messages",
        "front end",
        ("vllm.entrypoints.anthropic.serving:AnthropicServingMessages.message_stream_converter",),
        "a stream of `/v1/messages` that cannot go on ends with what pydantic says of the error",
    ),
    Patch(
        "patches.front_end.spare_front_end",
        "front end",
        ("vllm.config.profiler:ProfilerConfig.ignore_frontend",),
        "`/stop_profile` ends the server with SIGSEGV",
        upstream=f"{_ISSUE}54322",
    ),
    # What the server says about its answers
    Patch(
        "patches.tool_calls.count_tool_calls",
        "front end",
        (
            "vllm.parser:ParserManager.get_parser",
            f"{_PARSER}.parse",
            f"{_PARSER}.parse_delta",
            f"{_PARSER}.tool_parser_cls",
        ),
        "vLLM counts the calls of its parsers, and not what is wrong with the tool calls in them",
    ),
    Patch(
        "listener.server._Server",
        "front end",
        ("uvicorn.server:Server.capture_signals", "uvicorn.server:Server.startup"),
        "uvicorn takes the signals of the supervisor, and all connections that clients open",
        seen_in="uvicorn 0.54.0",
    ),
    Patch(
        "listener.bounded_connection.BoundedConnection",
        "front end",
        (
            f"{_HTTP}.connection_made",
            f"{_HTTP}.connection_lost",
            f"{_HTTP}.eof_received",
            f"{_HTTP}.pause_writing",
            f"{_HTTP}.resume_writing",
        ),
        "a client that sends no request, or does not read its answer, keeps its connection forever",
        seen_in="uvicorn 0.54.0",
    ),
    Patch(
        "listener.http_connection.HttpConnection",
        "front end",
        (
            f"{_HTTP}.data_received",
            f"{_HTTP}.on_message_begin",
            f"{_HTTP}.on_url",
            f"{_HTTP}.on_header",
            f"{_HTTP}.on_headers_complete",
            f"{_HTTP}.on_body",
            f"{_HTTP}.on_message_complete",
            f"{_HTTP}.on_response_complete",
            f"{_HTTP}._start_asgi_task",
        ),
        "uvicorn bounds neither the URL nor the headers of a request, nor the time that it takes",
        seen_in="uvicorn 0.54.0",
    ),
    Patch(
        "listener.websocket_connection.WebSocketConnection",
        "front end",
        (
            f"{_WEBSOCKET}.connection_made",
            f"{_WEBSOCKET}.connection_lost",
            f"{_WEBSOCKET}.eof_received",
            f"{_WEBSOCKET}.data_received",
            f"{_WEBSOCKET}.handle_connect",
            f"{_WEBSOCKET}.handle_text",
            f"{_WEBSOCKET}.handle_bytes",
            f"{_WEBSOCKET}.handle_cont",
            f"{_WEBSOCKET}.send_receive_event_to_app",
            f"{_WEBSOCKET}.pause_writing",
            f"{_WEBSOCKET}.resume_writing",
            f"{_WEBSOCKET}.receive",
            f"{_WEBSOCKET}.send",
        ),
        "a WebSocket may be silent forever, and an empty fragment of a message, of 6 bytes, counts "
        "as 0 bytes, so one client can fill the memory",
        seen_in="uvicorn 0.54.0",
    ),
    # What lets the server outlive its engine
    Patch(
        "patches.front_end.kill_trees_by",
        "front end",
        ("vllm.v1.utils:kill_process_tree",),
        "it raises if a process ends meanwhile, and skips the rest of the shutdown",
    ),
    Patch(
        "patches.front_end.kept_renderer",
        "front end",
        ("vllm.v1.engine.async_llm:renderer_from_config", f"{_BASE}.shutdown"),
        "every serving object keeps the first renderer, which ends with its engine",
    ),
    Patch(
        "patches.media_cache.keep_media_in_front_end",
        "engine",
        ("vllm.multimodal.cache.factories:_get_cache_type",),
        "a request with an image that was sent before has only a reference, and is lost with the "
        "engine that has the image",
    ),
    Patch(
        "engine.requests.continuation.restore",
        "front end",
        (
            f"{_STATE}.detokenizer",
            f"{_STATE}.is_prefilling",
            f"{_STATE}.logprobs_processor",
            f"{_STATE}.num_cache_creation_tokens",
            f"{_STATE}.num_cached_tokens",
            f"{_STATE}.sent_tokens_offset",
            f"{_STATE}.stats",
            f"{_STATE}.weight_version_starts",
            "vllm.logprobs:append_logprobs_for_next_position",
            "vllm.v1.engine:EngineCoreRequest.sampling_params",
            "vllm.v1.engine.logprobs:LogprobsProcessor.cumulative_logprob",
            "vllm.v1.metrics.stats:RequestStateStats.num_generation_tokens",
            "vllm.v1.metrics.stats:RequestStateStats.queued_ts",
        ),
        "a stream that has begun ends with its engine",
        is_guarantee=False,
    ),
    Patch(
        "patches.continued.resume_answers",
        "engine",
        (
            "vllm.v1.request:Request.append_output_token_ids",
            "vllm.v1.request:Request.from_engine_core_request",
            "vllm.v1.request:Request.prefill_stats",
            f"{_GRAMMAR}.reasoning_ended",
            f"{_GRAMMARS}._create_grammar",
            f"{_GRAMMARS}._get_constraint_bounds",
        ),
        "an engine cannot be given a part of the answer",
        is_guarantee=False,
    ),
    Patch(
        "patches.grammars.bound_grammars",
        "engine",
        (
            f"{_GRAMMARS}.accept_tokens",
            f"{_GRAMMARS}.grammar_bitmask",
            f"{_GRAMMARS}.grammar_init",
            f"{_GRAMMARS}._create_grammar",
            f"{_GRAMMARS}._get_constraint_bounds",
            f"{_GRAMMARS}.backend",
            f"{_GRAMMARS}.reasoner_cls",
            f"{_CONSTRAINT}._backend",
            "vllm.v1.request:Request.stop_reason",
            "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.register",
            f"{_GRAMMAR}._grammar",
            f"{_GRAMMAR}.grammar",
            "vllm.v1.structured_output.utils:strip_speculative_padding",
        ),
        "a grammar of 40 bytes takes longer with each token, and stops all requests for seconds; "
        "one of 240 KiB takes 280 MiB more with one token; all get the backend of the first",
        upstream=f"{_ISSUE}43920",
    ),
    Patch(
        "patches.continued.keep_sent_tokens",
        "worker",
        (
            "vllm.config.vllm:VllmConfig.use_v2_model_runner",
            "vllm.v1.worker.gpu_model_runner:CachedRequestState",
            "vllm.v1.worker.gpu_model_runner:CachedRequestState.output_token_ids",
        ),
        "the workers of the V1 runner would not know that part",
    ),
    Patch(
        "patches.thinking_budgets.count_sent_thoughts",
        "worker",
        (
            "vllm.config.vllm:VllmConfig.use_v2_model_runner",
            f"{_BUDGETS}._find_last_sequence_index",
            f"{_BUDGETS}._state",
            f"{_BUDGETS}._update_think_state",
            f"{_BUDGETS}.has_tracked_requests",
            f"{_BUDGETS}.sync_batch",
            f"{_BUDGETS}.think_end_token_ids",
            f"{_BUDGETS}.think_start_token_ids",
        ),
        "the V1 runner would force the end of a thought a second time in an answer that goes on",
        is_guarantee=False,
    ),
    Patch(
        "patches.stat_logger.LastingStatLogger",
        "front end",
        (f"{_STATS}.record", f"{_STATS}._gauge_cls", f"{_LOGGERS}:unregister_vllm_metrics"),
        "a new engine unregisters all counters, and the probe would count as traffic",
    ),
    Patch(
        "engine.openai_app.without_instrumentator",
        "front end",
        ("prometheus_fastapi_instrumentator:Instrumentator.instrument",),
        "the front end counts the requests that it answers itself under the same names",
        seen_in="prometheus-fastapi-instrumentator 8.1.0",
    ),
    # How processes are started, named and ended
    Patch(
        "patches.front_end.forked_cores",
        "front end",
        ("vllm.v1.engine.utils:get_mp_context",),
        "a spawned EngineCore imports vLLM at every restart, 8 s of processor time",
        is_guarantee=False,
        upstream=f"{_ISSUE}45483",
    ),
    Patch(
        "patches.front_end.models_inspected_by",
        "front end",
        ("vllm.model_executor.models.registry:_run_in_subprocess",),
        "a program that inspects a model's class imports vLLM once more, 6 s of a first start",
        is_guarantee=False,
    ),
    Patch(
        "patches.engine.fork_workers",
        "fork server",
        ("vllm.v1.executor.multiproc_executor:get_mp_context",),
        "a spawned worker imports vLLM at every restart, 8 s of processor time",
        is_guarantee=False,
        upstream=f"{_ISSUE}45483",
    ),
    Patch(
        "processes.forkserver.ensure_running",
        "front end",
        (
            "multiprocessing.forkserver:ForkServer._forkserver_pid",
            "multiprocessing.forkserver:ForkServer._forkserver_alive_fd",
            "multiprocessing.forkserver:ForkServer.ensure_running",
            "multiprocessing.process:BaseProcess._config",
        ),
        "Python raises if the exit code of its fork server was read elsewhere",
        seen_in="Python 3.11 to 3.13",
    ),
    Patch(
        "processes.forkserver.ForkedProcess",
        "front end",
        ("multiprocessing.context:ForkServerProcess._Popen",),
        "no engine would start where a fork server does not answer, or where CUDA forbids to fork",
        seen_in="Python 3.11 to 3.13",
    ),
    Patch(
        "processes.exits.record_exit_codes",
        "fork server",
        ("os:waitpid", "multiprocessing.process:_children"),
        "only the fork server, or a follower's executor, learns which signal ended a process, and "
        "discards it",
        seen_in="Python 3.11 to 3.13",
    ),
    Patch(
        "worker.lifetime.make_spawned_die_with_parent",
        "engine",
        ("multiprocessing.spawn:get_command_line",),
        "a process whose parent ends while it imports lives on, with its memory",
        upstream=f"{_ISSUE}55510",
        seen_in="Python 3.11 to 3.13",
    ),
    Patch(
        "worker.ipc_names.name_ipc_after",
        "engine",
        ("multiprocessing.shared_memory:_SHM_NAME_PREFIX",),
        "with random names, nothing tells which engine left a file in /dev/shm",
        is_guarantee=False,
        seen_in="Python 3.11 to 3.13",
    ),
    Patch(
        "worker.crash_records.record_causes",
        "engine",
        ("traceback:print_exc",),
        "each process would print a traceback that vLLM has already logged",
        is_guarantee=False,
        seen_in="Python 3.11 to 3.13",
    ),
    # The workspace and the worker
    Patch(
        "worker.plugin.register",
        "engine",
        (
            "vllm.v1.worker.workspace:WorkspaceManager",
            "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",
            "vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model",
        ),
        "the first prefill that needs more than is locked ends the engine",
        upstream=f"{_ISSUE}43357",
    ),
    Patch(
        "worker.hooks.WorkerHooks",
        "worker",
        (
            f"{_WORKER}.load_model",
            f"{_WORKER}.determine_available_memory",
            f"{_WORKER}.initialize_from_config",
            f"{_WORKER}.compile_or_warm_up_model",
            f"{_WORKER}.sample_tokens",
            f"{_WORKER}.execute_dummy_batch",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model",
        ),
        "scratch is reserved before the KV cache is sized, and no buffer of a graph is freed",
        upstream=f"{_ISSUE}48179",
    ),
    Patch(
        "workspace.moe_permute.guard",
        "worker",
        ("vllm.model_executor.layers.fused_moe.moe_permute_unpermute:MoEPermuteScratch.reserve",),
        "it frees tensors whose addresses graphs hold, and cannot grow after the lock",
    ),
    Patch(
        "patches.engine.accept_plain_functions",
        "engine",
        ("torch.compiler:load_compiled_function",),
        "on the CPU every start compiles the model again: 8.9 s, not 2.2 s, for the demo model",
        is_guarantee=False,
        upstream=f"{_ISSUE}24274",
        seen_in="torch 2.13.0",
    ),
    Patch(
        "patches.engine.read_notifications",
        "engine",
        (
            f"{_QUEUES}:SpinCondition.record_read",
            f"{_QUEUES}:SpinCondition.last_read",
            f"{_QUEUES}:SpinCondition.local_notify_socket",
        ),
        "an engine with several ranks, or on the CPU, that never idles for a second grows by 25 MB "
        "an hour in each of its processes",
        is_guarantee=False,
    ),
    Patch(
        "patches.engine.mark_nan_rows_of_v1",
        "worker",
        (
            "vllm.v1.worker.gpu_model_runner:count_nans_per_row",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        ),
        "counting the NaNs of 64 rows takes an H200 54 us of a step, a greatest value 20; with 3 "
        "drafts each, the rows of 1 request in 4 stand for all",
        is_guarantee=False,
        upstream=f"{_ISSUE}53029",
    ),
    Patch(
        "patches.engine.mark_nan_rows_of_v2",
        "worker",
        (
            "vllm.v1.worker.gpu.sample.output:SamplerOutput.num_nans",
            "vllm.v1.worker.gpu.sample.sampler:get_num_nans",
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:get_num_nans",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
        ),
        "counting the NaNs of 64 rows takes an H200 39 us of a step, a greatest value 20; with 3 "
        "drafts each, the rows of 1 request in 4 stand for all",
        is_guarantee=False,
        upstream=f"{_ISSUE}53029",
    ),
    Patch(
        "patches.engine.withhold_unused_seeds",
        "worker",
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",),
        "on the CPU a seed in a request whose prompt takes two steps ends the engine",
        upstream=f"{_ISSUE}10097",
    ),
    Patch(
        "patches.adapter_slots.yield_pinned_slots",
        "worker",
        (
            "vllm.lora.model_manager:LRUCacheLoRAModelManager.pin_adapter",
            "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters",
            "vllm.lora.worker_manager:WorkerLoRAManager.remove_adapter",
        ),
        "a step that needs the slot of a pinned adapter ends the engine",
    ),
    Patch(
        "patches.engine.keep_builds",
        "engine",
        ("vllm.distributed.device_communicators.pynccl_allocator:tempfile",),
        "every recovery with NCCL's symmetric memory would wait for a compiler",
        is_guarantee=False,
    ),
    Patch(
        "patches.engine.find_weight_cache",
        "worker",
        ("vllm.model_executor.model_loader.weight_cache.protocol:tempfile",),
        "an engine with its own `TMPDIR` does not find the daemon that has its weights",
        is_guarantee=False,
    ),
    Patch(
        "planning.command.plan",
        "plan",
        (
            "vllm.platforms:_current_platform",
            "vllm.engine.arg_utils:current_platform",
            f"{_PLATFORM}.get_device_name",
            f"{_PLATFORM}.get_device_total_memory",
            f"{_PLATFORM}.get_device_capability",
        ),
        "vLLM reads sizes from the device that it runs on, which a plan may not have",
    ),
)


def check(process: Process) -> None:
    """Check that the patches that guarantees need in such a process fit.

    Raises:
        EngineStartError: one does not.
    """
    for patch in PATCHES:
        if patch.is_guarantee and patch.process == process:
            require(patch)


def fits(by: str) -> bool:
    """Whether the patch that the function `by` applies fits; see `is_fit`."""
    [patch] = [patch for patch in PATCHES if patch.by == by]
    return is_fit(patch)
