// The arrays that token readers fill, at the binding.
#pragma once

#include <optional>

#include "arrays.h"
#include "gather.h"

namespace tdp {

// Flat outputs of one size; those that are not writable or differ in size are refused.
inline TokenOutputs token_outputs(Array<int64_t>& tokens, Array<int64_t>& labels, Array<float>& loss_mask,
                                  std::optional<Array<int64_t>>& position_ids) {
    const int64_t size = size_1d(tokens, "tokens");
    require_size(labels, "labels", size);
    require_size(loss_mask, "loss_mask", size);
    if (position_ids) require_size(*position_ids, "position_ids", size);
    return {tokens.mutable_data(), labels.mutable_data(), loss_mask.mutable_data(),
            position_ids ? position_ids->mutable_data() : nullptr, size};
}

}  // namespace tdp
