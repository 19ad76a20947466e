// ggml's Vulkan backend uses a few types of VK_EXT_layer_settings. Vulkan headers have these types since 1.3.272, but
// Debian 12 has older headers. This file is included before the backend's files and defines the types. They are used
// only if ggml is built with validation.

#pragma once

#include <vulkan/vulkan_core.h>

#ifndef VK_EXT_layer_settings

#include <vector>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char *        pLayerName;
    const char *        pSettingName;
    LayerSettingTypeEXT type;
    uint32_t            valueCount;
    const void *        pValues;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount((uint32_t) settings.size()), pSettings(settings.data()) {}

    VkStructureType         sType = (VkStructureType) 1000496000;
    const void *            pNext = nullptr;
    uint32_t                settingCount;
    const LayerSettingEXT * pSettings;
};

}

#endif
