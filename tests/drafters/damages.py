"""What happens to the configuration and tensors of a published checkpoint before it is read."""


def nested(config):
    return config.get("dflash_config", config)


def put_key(key, value, inner=False):
    def damage(config, tensors):
        (nested(config) if inner else config)[key] = value

    return damage


def drop_key(*keys):
    def damage(config, tensors):
        for key in keys:
            for place in (config, config.get("dflash_config", {}), config.get("transformer_layer_config", {})):
                place.pop(key, None)

    return damage


def in_layer(key, value):
    return lambda config, tensors: config["transformer_layer_config"].update({key: value})


def tensor(name, change):
    return lambda config, tensors: tensors.__setitem__(name, change(tensors.get(name)))


def verifier(**keys):
    return lambda config, tensors: config["speculators_config"]["verifier"].update(keys)


def several(*damages):
    def damage(config, tensors):
        for one in damages:
            one(config, tensors)

    return damage


def with_map(i, value):
    def change(x):
        x = x.copy()
        x[i] = value - i
        return x

    return tensor("d2t", change)


def without_maps(config, tensors):
    for name in ("d2t", "t2d"):
        tensors.pop(name)
