"""Which requests are admitted, and how are they answered? The layers before vLLM's routes.

Runs in the front end; `follower_health` and `metrics` run in a follower. `application` stacks
the layers: request log, other origins, key check, our own routes, quotas, limits, gate.

    request_log            one line for each request, and its ID
    cross_origin           which answers may web pages of other origins read?
    auth                   which requests carry a valid key?
    admin_attempts         which admin calls had no admin key?
    keyring, key_lines     which keys are valid now; what a file of keys says
    router                 which application answers a path, and what does the request occupy?
    quotas, usage_files    may a key send another request? what each has used, on disk
    limits, body_cost      what may a request ask for, and what does its body cost?
    message_limits         what may a message of a WebSocket ask for?
    gate, admission        passes a request to the engine, holds it or refuses it; decides which
    queue, shares          which request is next? how many may one key have in progress?
    errors                 every error in the form of OpenAI's API
    health, metrics, load  our own routes: is it up, what do scrapes read, what do routers read?
    follower_health        the health routes of a follower
    openapi                the document of all routes
    admin/                 what may an operator do?
"""
